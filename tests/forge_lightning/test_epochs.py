"""What a LightningModule logs for an epoch, and finds at its end, is what it would be under Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge_plugins import DDP
from tests.support.lasting_ranks import ranks

L = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchmetrics")

from torchmetrics import MeanMetric, MetricCollection  # noqa: E402
from torchmetrics.classification import (  # noqa: E402
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
)

from tests.forge_lightning.both import forge_trainer, lightning_trainer, made  # noqa: E402
from tests.support.profiles import some  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Scores(L.LightningModule):
    """Metrics logged as objects, metrics computed by hand, and a look at `callback_metrics` wherever an epoch ends."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(6, 3)
        self.of_epoch, self.of_both = MulticlassF1Score(3, average="macro"), MulticlassF1Score(3, average="macro")
        self.of_step, self.late = MulticlassAccuracy(3), MulticlassAUROC(3)
        self.by_hand, self.val_by_hand, self.val_late = MulticlassAUROC(3), MeanMetric(), MeanMetric()
        several = {"acc": MulticlassAccuracy(3), "precision": MulticlassPrecision(3)}
        self.val_scores = MetricCollection(several, prefix="val_")
        self.val_at_end = MulticlassF1Score(3, average="macro")
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, y = self.net(batch[0]), batch[1]
        entropy = F.cross_entropy(logits, y)
        self.by_hand.update(logits, y)
        self.late.update(logits, y)
        self.of_epoch.update(logits, y)
        self.of_both(logits, y)
        self.of_step(logits, y)
        if batch_idx == 0:  # which is enough, and before where a run is cut
            self.log("train_f1", self.of_epoch, on_step=False, on_epoch=True)
        self.log("train_both", self.of_both, on_step=True, on_epoch=True)
        self.log("train_acc", self.of_step)
        self.log("train_loss", entropy.item())
        self.log("train_entropy", entropy, on_epoch=True, prog_bar=True)
        self.log("train_rate", self.optimizers().param_groups[0]["lr"])
        return entropy + 0.1 * self.net.weight.square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("train_place", float(batch_idx), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("train_auroc", self.by_hand.compute())
        self.by_hand.reset()
        self.log("train_late", self.late)
        self.log("late_mean", self.val_late.compute())  # updated in the validation of this epoch
        self.val_late.reset()
        self.log("acc_over_epoch", self.of_step.compute())  # logged by step, and still there
        self.look()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, y = self.net(batch[0]), batch[1]
        loss = F.cross_entropy(logits, y)
        self.val_by_hand.update(loss)
        self.val_late.update(loss)
        self.val_scores.update(logits, y)
        self.val_at_end.update(logits, y)
        self.log("val_loss", loss)
        self.log_dict(self.val_scores)
        self.log("hp_metric", self.val_scores["acc"])

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.val_by_hand.compute())
        self.val_by_hand.reset()
        self.log("val_f1", self.val_at_end)
        self.look()

    def look(self) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["rate"])


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    train, val = TensorDataset(x[:43], y[:43]), TensorDataset(x[43:], y[43:])  # the last batch of each is smaller
    return DataLoader(train, 10, generator=generator), DataLoader(val, 8, generator=generator)


def by_lightning(module: Any) -> dict[str, float]:
    trainer = lightning_trainer(log_every_n_steps=1)
    trainer.fit(module, *loaders())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def by_forge(module: Any, val: Any = None, **options: Any) -> forge.FitResult:
    return forge_trainer(**options).fit(forge.LightningAdapter(module), loaders()[0], val or loaders()[1])


@pytest.fixture(scope="module")
def reference() -> tuple[Any, dict[str, float]]:
    """The module after Lightning's Trainer, and what it had logged."""
    module = made(Scores)
    return module, by_lightning(module)


EPOCH = {
    "train/auroc": "train_auroc",
    "train/late": "train_late",
    "train/late_mean": "late_mean",
    "train/acc_over_epoch": "acc_over_epoch",
    "train/f1_epoch": "train_f1",
    "train/both_epoch": "train_both_epoch",
    "train/entropy_epoch": "train_entropy_epoch",
    "train/place_epoch": "train_place_epoch",
    "val/loss": "val_loss",
    "val/acc": "val_acc",
    "val/precision": "val_precision",
    "val/hp_metric": "hp_metric",
    "val/mean": "val_mean",
    "val/f1": "val_f1",
}
STEP = {
    "train/acc": "train_acc",
    "train/both": "train_both_step",
    "train/train_loss": "train_loss",
    "train/rate": "train_rate",
    "train/place": "train_place_step",
}


@pytest.mark.parametrize("log_every", some([3, 1, 50]))
def test_an_epochs_values_are_lightnings_however_often_is_logged(reference: Any, log_every: int) -> None:
    module, theirs = reference
    ours = made(Scores)
    metrics = by_forge(ours, log_every=log_every).metrics
    assert torch.equal(ours.net.weight, module.net.weight)
    for name, called in {**EPOCH, **(STEP if log_every == 1 else {})}.items():
        assert metrics[name] == pytest.approx(theirs[called], rel=1e-6), name
    expected = {*EPOCH, *STEP, "train/loss", "train/entropy"}
    assert {name for name in metrics if name.startswith(("train/", "val/"))} == expected


def test_hooks_at_the_end_of_an_epoch_find_what_they_expect(reference: Any) -> None:
    module, _ = reference
    ours = made(Scores)
    by_forge(ours, log_every=1)
    assert len(ours.seen) == len(module.seen) == 6  # a validation's end and a training epoch's, three times
    for found, theirs in zip(ours.seen, module.seen, strict=True):
        for name, value in theirs.items():
            assert found[name] == pytest.approx(value, rel=1e-6), name


def test_with_several_loaders_a_metric_is_of_each() -> None:
    module = made(Scores)
    module.validation_step = lambda batch, batch_idx, dataloader_idx: Scores.validation_step(module, batch, batch_idx)
    metrics = by_forge(module, {"a": loaders()[1], "b": loaders()[1]}, max_epochs=1).metrics
    once = by_forge(made(Scores), max_epochs=1).metrics
    for name in ("acc", "precision", "hp_metric", "loss"):
        assert metrics[f"val/a/{name}"] == metrics[f"val/b/{name}"] == pytest.approx(once[f"val/{name}"])
    for name in ("val/mean", "val/f1", "train/late_mean"):
        assert metrics[name] == pytest.approx(once[name])
    assert module.seen[0]["val_mean"] == pytest.approx(once["val/mean"])


def scores(*plugins: Any) -> tuple[list[Any], dict[str, Any]]:
    """Weights and metrics."""
    module = made(Scores)
    metrics = by_forge(module, plugins=list(plugins)).metrics
    return [p.tolist() for p in module.parameters()], dict(metrics)


@pytest.mark.slow
def test_two_ranks_train_and_log_what_one_process_does() -> None:
    weights, metrics = scores()
    for theirs, logged in ranks(2)(scores, DDP()):
        for found, expected in zip(theirs, weights, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        for name in EPOCH.keys() - {"val/mean", "train/late_mean"}:  # means of means, of other batches
            assert logged[name] == pytest.approx(metrics[name], rel=1e-4), name


class Sometimes(L.LightningModule):
    """Logs a number that is the loss on some batches, and not on others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        entropy = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", entropy.item(), on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return entropy + 0.1 * F.relu(batch[0][:, 0].max() - 1.5) * self.net.weight.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def sometimes(*plugins: Any) -> dict[str, Any]:
    x = torch.zeros(40, 6)
    x[22, 0] = 3.0  # one sample of the third batch: on one of two ranks
    train = DataLoader(TensorDataset(x, torch.arange(40) % 3), 10)
    task = forge.LightningAdapter(made(Sometimes))
    return dict(forge_trainer(max_epochs=1, plugins=list(plugins), log_every=1).fit(task, train).metrics)


@pytest.mark.slow
def test_a_number_one_rank_finds_unequal_stops_nobody() -> None:
    alone = sometimes()
    assert alone["train/train_loss"] == pytest.approx(alone["train/loss"])  # once another, always under its own name
    for metrics in ranks(2)(sometimes, DDP()):
        assert metrics.keys() == alone.keys()
        assert metrics["train/train_loss"] > 0
