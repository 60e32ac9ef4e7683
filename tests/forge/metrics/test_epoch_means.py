"""Means of epochs beside those of intervals, and logs of a few updates without a cliff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
from forge.data import TensorLoader
from forge.metrics.means import Means
from forge.testing import TinyGAN, TinyTask, assert_same, fit_tiny
from forge_plugins import JSONL, Checkpoint
from tests.forge.snapshot.test_resume import die, live, log_of


class Numbers(forge.TaskModule):
    """Logs the number in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, ...]) -> Any:
        return {"loss": self.layer(batch[0]).mean() * 0, "number": batch[0].mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(folder: Path, numbers: list[float], **options: Any) -> list[dict[str, float]]:
    batches = [(torch.full((2, 1), number),) for number in numbers]
    settings = {"max_epochs": 2, "device": "cpu", "run_dir": folder, **options}
    forge.Trainer(plugins=[JSONL()], **settings).fit(Numbers(), batches)
    return log_of(folder)


def points(log: list[dict[str, float]], name: str) -> dict[int, float]:
    return {int(line["update"]): line[name] for line in log if name in line}


def test_an_epoch_has_its_own_mean(tmp_path: Path) -> None:
    numbers = [1.0, 2.0, 3.0, 4.0, 10.0]
    log = logged(tmp_path, numbers, log_every=2)
    assert points(log, "train/number_epoch") == {5: 4.0, 10: 4.0}
    assert points(log, "train/number") == {2: 1.5, 4: 3.5, 5: 10.0, 6: 1.0, 8: 2.5, 10: 7.0}


def test_the_mean_of_an_epoch_is_weighted_by_samples() -> None:
    _, result = fit_tiny([], max_epochs=1, log_every=2)
    _, expected = fit_tiny([], max_epochs=1, log_every=100)
    assert result.metrics["train/loss_epoch"] == pytest.approx(expected.metrics["train/loss"], rel=1e-12)
    assert expected.metrics["train/loss_epoch"] == expected.metrics["train/loss"]


def test_only_what_a_task_returns_has_an_epoch_mean() -> None:
    @forge.on("step_end")
    def record(step: forge.Step) -> None:
        step.record("norm/all", 1.0)

    names = fit_tiny([record], task=TinyGAN())[1].metrics
    assert [name for name in names if name.endswith("_epoch")] == [
        "train/generator/loss_epoch",
        "train/discriminator/loss_epoch",
    ]


def test_a_torchmetrics_object_has_no_epoch_mean() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.peak = torchmetrics.MaxMetric()

        def training_step(self, batch: Any) -> Any:
            output = super().training_step(batch)
            self.peak.update(output["loss"])
            return {**output, "peak": self.peak}

    names = fit_tiny([], task=Measured())[1].metrics
    assert "train/peak" in names
    assert "train/peak_epoch" not in names


@pytest.mark.slow
def test_a_run_cut_within_an_epoch_logs_the_same_means(tmp_path: Path) -> None:
    plugins = lambda: [Checkpoint("1 updates", background=False), JSONL()]  # noqa: E731
    data = lambda: TensorLoader(torch.randn(72, 6), torch.randint(3, (72,)), batch_size=8, shuffle=True)  # noqa: E731
    torch.manual_seed(0)
    train = data()
    options = {"log_every": 10, "max_epochs": 2}
    straight, expected = live(tmp_path / "straight", plugins(), train=train, **options)
    for update in (4, 10, 13):
        die(tmp_path / "cut", plugins(), update, train=train, **options)
    again, result = live(tmp_path / "cut", plugins(), train=train, **options)
    assert_same(again, straight)
    assert (log_of(tmp_path / "cut"), result.metrics) == (log_of(tmp_path / "straight"), expected.metrics)


def test_means_of_a_device_and_of_the_host_agree() -> None:
    """On an accelerator sums are tensors: here those of the CPU, in the same code."""
    here, there = Means(torch.device("cpu")), Means(torch.device("cpu"))
    for means in (here, there):
        means.track(TinyTask())
    assert there._history is not None
    there.on_host = there._history._on_host = False
    for interval, ends in (([1.0, 2.0, 3.0, 4.0, 5.0], False), ([60.0], True), ([7.0], False), ([8.0, 9.0], True)):
        read = []
        for means in (here, there):
            for value in interval:
                means.add("train/x", torch.tensor(value), 2)
            state = means.state_dict()
            means.load_state_dict(state)
            read.append(means.read(ends).result())
        assert read[0] == pytest.approx(read[1])
        assert ("train/x_epoch" in read[0]) == ends
