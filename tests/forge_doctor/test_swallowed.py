"""Experiments may fail in silence only where they say why: none of them swallows an error on plain tasks.

Three kinds of experiments once never ran on a model with batch normalisation, and no test saw it.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import forge
import forge_doctor.doctor  # noqa: F401 so that its modules are there
from forge_doctor.deadline import Deadline
from tests.support.patients import Healthy, loader, numbers, splits
from tests.support.profiles import some


class Swallowed:
    """`contextlib.suppress`, which notes what it swallows."""

    seen: list[str]

    def __init__(self, *kinds: type[BaseException]):
        self.kinds = kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None or not issubclass(kind, self.kinds):
            return False
        if not issubclass(kind, LookupError):  # how an experiment says that it has nothing to look at
            frames = [f for f in traceback.extract_tb(trace) if "forge_doctor" in f.filename]
            self.seen.append(f"{frames[0].filename.rpartition('/')[2]}:{frames[0].lineno} {kind.__name__}: {error}")
        return True


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Swallowed, "seen", [], raising=False)
    for name, module in list(sys.modules.items()):
        if name.startswith("forge_doctor") and hasattr(module, "suppress"):
            monkeypatch.setattr(module, "suppress", Swallowed)
    return Swallowed.seen


class Pictures(Healthy):
    """A small convolutional network with batch normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(128, 4),
        )


class Padded(Healthy):
    """Labels of sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(12, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0])

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        known = y != -100
        right = (scores.argmax(-1) == y)[known].float().mean()
        return {"loss": F.cross_entropy(scores.transpose(1, 2), y), "accuracy": right}

    validation_step = training_step


def pictures() -> Any:
    x, y = numbers()
    x = x.repeat(1, 2).reshape(-1, 1, 4, 4)
    return loader(x[:112], y[:112]), loader(x[112:], y[112:])


def sequences() -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(1, 12, (int(n),), generator=generator) for n in torch.randint(4, 9, (160,), generator=generator)
    ]
    pad = nn.utils.rnn.pad_sequence

    def collate(items: list[Tensor]) -> tuple[Tensor, Tensor]:
        return pad(items, True), pad([item % 4 for item in items], True, -100)

    return DataLoader(rows[:112], 16, shuffle=True, collate_fn=collate), DataLoader(rows[112:], 16, collate_fn=collate)  # pyright: ignore[reportArgumentType]


CASES = {"pictures": (Pictures, pictures), "plain": (Healthy, splits), "sequences": (Padded, sequences)}


@pytest.mark.parametrize("name", some(list(CASES), quick=1))
def test_no_experiment_fails_in_silence(name: str, swallowed: list[str]) -> None:
    kind, data = CASES[name]
    torch.manual_seed(0)
    report = forge.doctor(kind(), *data(), deadline=Deadline())
    assert swallowed == []
    assert report.skipped == {}
    assert not report.errors
