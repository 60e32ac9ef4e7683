"""What the tests of spans share."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_plugins import Spans
from tests.support.tasks import fit


class Clock:
    """Seconds that pass when somebody spends them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, ms: float) -> None:
        self.now += ms / 1e3


def set_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let spans and the Trainer measure by a clock of their own."""
    clock = Clock()
    monkeypatch.setattr("forge.spans.goodput.clock", clock)
    monkeypatch.setattr("forge.spans.record.clock", lambda: round(1e9 * clock()))
    monkeypatch.setattr("forge.engine.trainer.time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return set_clock(monkeypatch)


class Sink(forge.Plugin):
    """Keeps every log."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[int, dict[str, Any]] = {}

    @forge.hookimpl
    def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
        self.logs.setdefault(update, {}).update(metrics)


def logged(task: forge.TaskModule | None = None, *plugins: forge.Plugin, **options: Any) -> dict[int, dict[str, Any]]:
    sink = Sink()
    fit(task, plugins=[Spans(**{"rates": True, **options.pop("given", {})}), *plugins, sink], **options)
    return sink.logs


def tokens(count: int = 5) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(11, (2, 2, 7), generator=generator)) for _ in range(count)]


class MLP(forge.TaskModule):
    """m samples through layers without a bias."""

    def __init__(self, *widths: int):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in pairwise(widths)))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)
