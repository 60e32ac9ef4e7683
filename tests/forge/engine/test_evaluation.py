"""Evaluation: the right modes, exact means, and everything put back after."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.data import Loader
from tests.support.tasks import Classifier, fit, make_batches, noting


class Watching(Classifier):
    """Remembers the modes its validation ran in, and draws from the RNG there."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(8)
        self.seen: list[Any] = []

    def validation_step(self, batch: Any) -> Any:
        self.seen.append(
            (self.training, self.dropout.training, torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        )
        torch.rand(3)
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("mode", "inference", "grad"), [("inference", True, False), ("no_grad", False, False), ("grad", False, True)]
)
def test_evaluation_runs_in_each_of_its_gradient_modes(mode: Any, inference: bool, grad: bool) -> None:
    task = Watching()
    type(task).evaluation = mode
    forge.Trainer(plugins=[]).validate(task, make_batches(1))
    assert task.seen == [(False, False, inference, grad)]


def test_every_modules_own_flag_is_put_back() -> None:
    freeze, _ = noting("start", lambda trainer: trainer.task.frozen.eval())
    look, modes = noting("boundary", lambda trainer: (trainer.task.training, trainer.task.frozen.training))
    fit(Watching(), val=make_batches(1), plugins=[freeze, look], validate_every="1 updates")
    assert set(modes) == {(True, False)}


def test_validation_leaves_rng_and_weights_alone() -> None:
    torch.manual_seed(0)

    class Dropping(Watching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.dropout(x))

    task = Dropping()
    twin = copy.deepcopy(task)
    fit(task, seed=1, validate_every=None, val=make_batches(1))
    loader = torch.utils.data.DataLoader(make_batches(2), batch_size=None, shuffle=True)
    fit(twin, seed=1, validate_every="1 updates", val=loader)
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), twin.parameters(), strict=True))


def test_a_gradient_of_evaluation_does_not_leak() -> None:
    class Adversarial(Classifier):
        evaluation = "grad"

        def validation_step(self, batch: Any) -> Any:
            loss = self.training_step(batch)["loss"]
            loss.backward()
            return loss

    torch.manual_seed(0)
    task = Adversarial()
    twin = copy.deepcopy(task)
    fit(task, validate_every="1 updates", val=make_batches(1))
    fit(twin)
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), twin.parameters(), strict=True))


def test_metrics_are_weighted_by_items_over_uneven_batches() -> None:
    task, data = Classifier(), make_batches(2, size=5) + make_batches(1, size=2)
    everything = (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    expected = task.training_step(everything)
    metrics = forge.Trainer(plugins=[]).validate(task, data)
    assert metrics["val/accuracy"] == pytest.approx(expected["accuracy"].item())
    assert metrics["val/loss"] == pytest.approx(expected["loss"].item())


def test_a_plain_tensor_from_validation_is_its_loss() -> None:
    class Plain(Classifier):
        def validation_step(self, batch: Any) -> torch.Tensor:
            return self.training_step(batch)["loss"]

    data = make_batches(2)
    task = Plain()
    losses = [task.validation_step(batch).item() for batch in data]
    assert forge.Trainer(plugins=[]).validate(task, data) == {"val/loss": pytest.approx(sum(losses) / 2)}


def test_several_validation_loaders_are_told_apart_by_name() -> None:
    metrics = fit(val={"seen": make_batches(1), "unseen": make_batches(1, seed=9)}).metrics
    assert {"val/seen/loss", "val/unseen/loss"} <= metrics.keys()
    assert metrics["val/seen/loss"] != metrics["val/unseen/loss"]


def test_validate_every_counts_updates_and_epochs() -> None:
    updates: list[int] = []

    class Count(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_evaluate(self, trainer: forge.Trainer) -> Any:
            updates.append(trainer.progress.update)
            return (yield)

    fit(val=make_batches(1), max_epochs=2, plugins=[Count()], validate_every="3 updates")
    fit(val=make_batches(1), max_epochs=2, plugins=[Count()], validate_every="2 epochs")
    fit(val=make_batches(1), max_epochs=2, plugins=[Count()])
    assert updates == [3, 6, 8, 4, 8]


def test_evaluation_end_adds_scalars_pictures_and_texts() -> None:
    sink, logs = noting("log", lambda metrics: metrics)

    class Ends(Classifier):
        def evaluation_end(self, stage: str) -> dict[str, Any]:
            return {"f1": torch.tensor(0.5), "shot": forge.Image(torch.zeros(1, 2, 2)), "note": forge.Text(stage)}

    result = fit(Ends(), val=make_batches(1), plugins=[sink])
    logged = {name: value for metrics in logs for name, value in metrics.items()}
    assert (logged["val/f1"], logged["val/note"].text) == (0.5, "val")
    assert isinstance(logged["val/shot"], forge.Image)
    assert result.metrics["val/f1"] == 0.5
    assert "val/shot" not in result.metrics


def test_test_and_predict_fall_back_to_other_steps() -> None:
    task, data = Classifier(), make_batches(2)
    trainer = forge.Trainer(plugins=[])
    assert trainer.test(task, data)["test/loss"] == trainer.validate(task, data)["val/loss"]
    outputs = trainer.predict(task, data)
    assert len(outputs) == 2
    assert torch.equal(outputs[0], task(data[0][0]))
    assert torch.equal(trainer.predict(task, [x for x, _ in data])[0], outputs[0])


def test_a_wrapper_of_evaluate_sees_and_may_change_the_result() -> None:
    class Doubles(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_evaluate(self) -> Any:
            metrics = yield
            return {**metrics, "val/twice": 2 * metrics["val/loss"]}

    metrics = fit(val=make_batches(1), plugins=[Doubles()]).metrics
    assert metrics["val/twice"] == 2 * metrics["val/loss"]


def test_an_inference_tensor_in_training_names_the_setting() -> None:
    class Caches(Classifier):
        cached: Any = None

        def validation_step(self, batch: Any) -> Any:
            self.cached = batch[0] * 2
            return super().training_step(batch)

        def training_step(self, batch: Any) -> Any:
            x = batch[0] if self.cached is None else self.cached
            return super().training_step((x, batch[1]))

    with pytest.raises(RuntimeError) as caught:
        fit(Caches(), val=make_batches(1), validate_every="1 updates")
    assert any("evaluation = 'no_grad'" in note for note in caught.value.__notes__)


def test_a_validation_loader_too_short_is_refused() -> None:
    class Short(list):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[:1])

    with pytest.raises(forge.DataError, match=r"val loader gave 1 batches, but its length says 3"):
        fit(val=Short(make_batches(3)))


class Looking(Classifier):
    """Remembers what it was trained on, and each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        self.trained.append(batch[0].tolist())
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.validated.append(batch[0].tolist())
        return super().training_step(batch)


def test_every_validation_is_the_same_with_a_shared_loader() -> None:
    def loader() -> Loader:
        return Loader(torch.utils.data.TensorDataset(torch.randn(12, 8), torch.arange(12) % 3), 4, shuffle=True)

    torch.manual_seed(0)
    shared, alone = loader(), Looking()
    task = copy.deepcopy(alone)
    fit(task, train=shared, val=shared, max_epochs=3, validate_every="2 updates", seed=1)
    passes = [task.validated[start : start + 3] for start in range(0, len(task.validated), 3)]
    assert len(passes) > 3
    assert all(each == passes[0] for each in passes)
    fit(alone, train=shared, max_epochs=3, seed=1)
    assert task.trained == alone.trained
    assert len({str(alone.trained[start : start + 3]) for start in (0, 3, 6)}) == 3


def test_a_validation_loader_is_told_that_it_is_epoch_0() -> None:
    class Told(list):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Own:
        def __init__(self) -> None:
            self.sampler = Told()

        def __iter__(self) -> Any:
            return iter(make_batches(2))

    fit(val=Own(), max_epochs=3)
    assert Told.epochs == [0, 0, 0]
