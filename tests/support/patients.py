"""Small tasks for the probes of `forge doctor`: a healthy one, and variants with one mistake each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import forge
from forge.diagnose.checks.user_line import FindingWarning
from forge.engine.trainer import Trainer
from forge_doctor.doctor import Examination
from forge_doctor.findings import Finding
from forge_doctor.first_look import FirstLook
from forge_doctor.patient import Patient, no_trace
from forge_doctor.report import DoctorReport

Probe = Callable[[Patient], Iterator[Finding]]


class Healthy(forge.TaskModule):
    """Four classes from eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.loss(self(x), y)

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        return {"loss": F.cross_entropy(scores, y), "accuracy": (scores.argmax(1) == y).float().mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Keeps(Healthy):
    """Keeps every loss, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        self.history.append(loss)
        return loss


class Regression(Healthy):
    """Numbers from some numbers."""

    def __init__(self, inputs: int = 8, outputs: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))

    def training_step(self, batch: Any) -> Any:
        x, y = batch[:2]
        return F.mse_loss(self(x), y.reshape(len(x), -1))

    validation_step = training_step


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Made(Dataset[Any]):
    """Samples that a function makes of their numbers, when they are read."""

    def __init__(self, make: Callable[[int], Any], count: int = 200):
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def task_with(loss: Any, outputs: int = 4) -> Healthy:
    """The healthy task with another loss."""
    task = Healthy()
    task.loss = loss  # pyright: ignore[reportAttributeAccessIssue]
    task.net[2] = nn.Linear(16, outputs)
    task.check_first_batch = False  # pyright: ignore[reportAttributeAccessIssue]
    return task


def numbers(count: int = 160, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(8, 4, generator=generator)
    x = torch.randn(count, 8, generator=generator.manual_seed(seed + 1))
    return x, (x @ teacher).argmax(1)


def loader(*tensors: Tensor, shuffle: bool = True, batch: int = 16, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch, shuffle=shuffle, **options)


def splits() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return loader(*numbers()), loader(*numbers(48, seed=5), shuffle=False)


def found(
    task: forge.TaskModule, *probes: Probe, data: Any = None, after: int = 0, last: bool = False
) -> dict[str, Finding]:
    """What probes find, by name; those run after `after` updates where it is not 0, or once the run is over."""
    train, val = data or splits()
    report = DoctorReport()
    examination = Examination(report, train, val, lambda what: None)
    chosen = {probe.__name__: probe for probe in probes}
    examination.first_probes = chosen if not after and not last else {}
    examination.last_probes = chosen if after else {}
    examination.updates = after or 1
    trainer = Trainer(plugins=[], run_dir=False, seed=0, max_epochs=10, validate_every=None)
    trainer.stack.add(examination)
    untrained = copy.deepcopy(task)
    trainer.fit(task, train, val)
    if last:
        assert examination.patient is not None
        examination.patient.original = untrained
        with no_trace(torch.device("cpu")):
            examination.probe(chosen)
    assert not report.skipped, report.skipped
    return {finding.name: finding for finding in report.findings}


def said(task: forge.TaskModule, train: Any = None, val: Any = None, **options: Any) -> list[str]:
    """The names of the findings that a fit warns of."""
    if train is None:
        train, val = splits()
    options = {"max_epochs": 1, "run_dir": False, "device": "cpu", "seed": 0} | options
    options["plugins"] = [FirstLook(), *options.get("plugins", ())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forge.Trainer(**options).fit(task, train, val)
    return [item.message.finding for item in caught if isinstance(item.message, FindingWarning)]
