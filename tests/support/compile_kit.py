"""What the tests of compile share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.testing import TinyTask, fit_tiny, tiny_batches

EVEN = (8, 8)


@pytest.fixture(autouse=True)
def nothing_of_the_last_test() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forge")


class Plain(TinyTask):
    """One layer: compiles in no time."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Linear(6, 3)


def fit(plugin: forge.Plugin | None, task: forge.TaskModule | None = None, *more: forge.Plugin, **options: Any) -> Any:
    """A short fit of a small task; returns the task and the result."""
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "train": tiny_batches(EVEN),
        "val": tiny_batches([8], seed=1),
        **options,
    }
    plugins = [*more] if plugin is None else [plugin, *more]
    return fit_tiny(plugins, task=task or Plain(), **settings)


def counts(result: forge.FitResult) -> tuple[float, float, float]:
    """Graphs, breaks, recompiles, as they were logged."""
    return tuple(result.metrics[f"compile/{name}"] for name in ("graphs", "breaks", "recompiles"))  # pyright: ignore


class Chain(TinyTask):
    """Layers in a row, of these widths."""

    def __init__(self, *widths: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(*[nn.Linear(a, b) for a, b in zip((6, *widths), (*widths, 3), strict=True)])


class Breaks(Plain):
    def training_step(self, batch: Any) -> Any:
        logits = self.net(batch[0])
        torch._dynamo.graph_break()
        return F.cross_entropy(logits, batch[1])
