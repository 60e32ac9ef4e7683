"""The LightningModules that ship with Lightning train through the adapter as under Lightning's Trainer, bit for bit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import forge
from forge.errors import TaskError
from forge_plugins import DDP, Accumulate
from tests.support.lasting_ranks import ranks

L = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.demos.boring_classes import (  # noqa: E402
    BoringDataModule,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    RandomDataset,
)
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2  # noqa: E402

from tests.support.profiles import some  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def own(dataset: Any, **options: Any) -> DataLoader[Any]:
    """A DataLoader with a generator of its own. Without one, beginning an epoch draws a number from the global
    generator under Lightning, and so another dropout follows; forge's loaders never draw from it."""
    return DataLoader(dataset, generator=torch.Generator().manual_seed(3), **options)


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make()


def by_lightning(module: Any, train: Any, val: Any = None, **options: Any) -> dict[str, Tensor]:
    """The weights after Lightning's own Trainer."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(**{"max_epochs": 3, "num_sanity_val_steps": 0, "accelerator": "cpu", **quiet, **options})
    L.seed_everything(7, verbose=False)
    trainer.fit(module, train, val)
    return module.state_dict()


def by_forge(module: Any, train: Any, val: Any = None, **options: Any) -> forge.FitResult:
    settings = {"max_epochs": 3, "seed": 7, "plugins": [], "run_dir": False, "device": "cpu", **options}
    return forge.Trainer(**settings).fit(forge.LightningAdapter(module), train, val)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def words(empty_folder: Path) -> WikiText2:
    """A small text where theirs would be downloaded to."""
    generator = torch.Generator().manual_seed(0)
    lines = torch.randint(40, (12, 20), generator=generator).tolist()
    (empty_folder / "data").mkdir()
    (empty_folder / "data/wikitext-2.txt").write_text("\n".join(" ".join(f"w{i}" for i in line) for line in lines))
    return WikiText2()


@pytest.mark.slow
def test_demo_model_also_with_accumulated_gradients() -> None:
    train = own(RandomDataset(32, 24), batch_size=4)
    ours = [made(DemoModel), made(DemoModel)]
    by_forge(ours[0], train)
    by_forge(ours[1], train, plugins=[Accumulate(3)])
    assert equal(ours[0].state_dict(), by_lightning(made(DemoModel), train))
    assert equal(ours[1].state_dict(), by_lightning(made(DemoModel), train, accumulate_grad_batches=3))


def test_their_own_data_and_setup_are_used_without_a_loader(words: WikiText2) -> None:
    task = forge.LightningAdapter(LightningTransformer(words.vocab_size))
    loader = task.train_loader()  # prepare_data finds the text, train_dataloader reads it
    assert len(loader) == len(words)
    data = forge.LightningAdapter(BoringModel(), BoringDataModule())
    result = forge.Trainer(max_updates=3, plugins=[], run_dir=False).fit(data, data.train_loader(), data.val_loader())
    assert result.updates == 3
    assert forge.Trainer(plugins=[]).test(data, data.test_loader()).keys() == {"test/y"}
    assert len(forge.Trainer(plugins=[]).predict(data, data.predict_loader())) == 64


@pytest.mark.slow
def test_manual_optimization_trains_the_same_weights() -> None:
    train = own(RandomDataset(32, 16))
    theirs, ours = by_lightning(made(ManualOptimBoringModel), train), made(ManualOptimBoringModel)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    by_forge(ours, train)
    assert equal(ours.state_dict(), theirs)
    assert not equal(ours.state_dict(), before)


class Rich(L.LightningModule):
    """What people write: dropout, a schedule per step, a metric, hooks, hyperparameters."""

    def __init__(self, width: int = 16, plateau: bool = False):
        super().__init__()
        from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 1))
        self.accuracy, self.train_accuracy, self.by_hand = BinaryAccuracy(), BinaryAccuracy(), BinaryF1Score()
        self.heard: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx == 1:
            return None
        logits, y = self(batch), (batch.sum(1) > 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        self.train_accuracy(logits, y.long())
        self.by_hand.update(logits, y.long())
        self.log("train_acc", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        self.log("lr_now", self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits, y = self(batch), (batch.sum(1) > 0).float()
        self.accuracy(logits, y.long())
        self.log("val_loss", nn.functional.binary_cross_entropy_with_logits(logits, y), batch_size=len(batch))
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.hparams["plateau"]:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        total = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
        slow = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}, {"scheduler": slow, "frequency": 2}]

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def hear(self, name: str) -> None:
        self.heard.append(f"{name} {self.current_epoch} {self.global_step}")

    def on_train_start(self) -> None:
        self.hear("train_start")

    def on_train_epoch_start(self) -> None:
        self.hear("epoch_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hear("before_step")
        self.log("grad", sum(p.grad.abs().sum() for p in self.parameters() if p.grad is not None))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hear(f"batch_end_{batch_idx}")

    def on_validation_epoch_end(self) -> None:
        self.hear("val_end")

    def on_train_epoch_end(self) -> None:
        self.hear("epoch_end")
        self.log("train_f1", self.by_hand.compute())
        self.by_hand.reset()

    def on_train_end(self) -> None:
        self.hear("train_end")


@pytest.mark.parametrize("plateau", some([True, False]))
def test_a_module_with_everything_is_equal_in_bits_and_hooks(plateau: bool) -> None:
    train, val = own(RandomDataset(32, 16), batch_size=4), own(RandomDataset(32, 10), batch_size=4)
    reference = made(lambda: Rich(plateau=plateau))
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    L.seed_everything(7, verbose=False)
    trainer.fit(reference, train, val)
    ours = made(lambda: Rich(plateau=plateau))
    result = by_forge(ours, train, val)
    assert equal(ours.state_dict(), reference.state_dict())
    assert ours.heard == reference.heard
    assert result.metrics["val/loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-6)
    assert result.metrics["val/acc"] == pytest.approx(float(trainer.callback_metrics["val_acc"]), rel=1e-6)
    for ours_called, theirs in (
        ("train/loss_epoch", "train_loss_epoch"), ("train/acc_epoch", "train_acc_epoch"), ("train/f1", "train_f1"),
    ):  # fmt: skip
        assert result.metrics[ours_called] == pytest.approx(float(trainer.callback_metrics[theirs]), rel=1e-6)


def test_weights_go_both_ways_and_a_run_can_be_continued(tmp_path: Path) -> None:
    train = own(RandomDataset(32, 16), batch_size=4)
    module = made(BoringModel)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, train)
    trainer.save_checkpoint(tmp_path / "theirs.ckpt", weights_only=True)
    task = forge.LightningAdapter(BoringModel())
    assert forge.load_weights(task, tmp_path / "theirs.ckpt").complete
    assert equal(task.module.state_dict(), module.state_dict())
    from safetensors.torch import load_file

    by_forge(task.module, train, run_dir=tmp_path / "run", max_epochs=1)
    other = BoringModel()
    other.load_state_dict(load_file(tmp_path / "run/weights.safetensors"))
    again = forge.LightningAdapter.from_checkpoint(tmp_path / "run", module=BoringModel())
    assert equal(other.state_dict(), task.module.state_dict())
    assert equal(again.module.state_dict(), other.state_dict())
    with pytest.raises(TaskError, match="does not hold module"):
        forge.LightningAdapter.from_checkpoint(tmp_path / "run")


def rich_without_dropout(*plugins: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and metrics; every sample's own way through, so that shares of ranks add up."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    train, val = RandomDataset(32, 9), RandomDataset(32, 9)  # one rank has no share of the last batch
    module = made(lambda: Rich(width=8))
    module.net[2].p = 0.0
    module.training_step = lambda batch, batch_idx: Rich.training_step(module, batch, 0)
    result = by_forge(module, own(train, batch_size=4), own(val, batch_size=4), plugins=list(plugins))
    return {name: value.tolist() for name, value in module.state_dict().items()}, dict(result.metrics)


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains() -> None:
    weights, metrics = rich_without_dropout()
    for ours, logged in ranks(2)(rich_without_dropout, DDP()):
        for name, value in weights.items():
            torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(value), rtol=1e-5, atol=1e-6)
        for name in (
            *(f"train/{name}" for name in ("loss", "loss_epoch", "acc", "acc_epoch", "f1")),
            "val/loss",
            "val/acc",
        ):
            assert logged[name] == pytest.approx(metrics[name], rel=1e-4), name
