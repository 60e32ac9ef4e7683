"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge import registry
from forge.testing import tiny_batches
from forge_kernels.timing import Timing
from forge_speed.kernels import Kernels
from forge_speed.kernels.judgement import StepCost, StepTrial
from tests.support.toy_kernels import CALLS, entries

RELU_ITSELF, LAYER_NORM_ITSELF = F.relu, F.layer_norm
FOUR: dict[str, Any] = {"train": tiny_batches([8] * 4), "max_updates": 4, "log_every": 1, "validate_every": None}
"""Four updates with one shape, and nothing else."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    CALLS.clear()
    yield
    assert F.relu is RELU_ITSELF


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have these toys installed, and nothing else."""
    others = registry.installed

    def install(*names: str) -> None:
        found = entries(*names)
        monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))

    return install


class Clock:
    """In a stopwatch's place: the first work, which is as written, takes 1 ms, the others what they are told to."""

    ms: tuple[float, ...] = (0.5,)
    step_ms: float = 0.5
    "What the whole step takes with kernels; as written it takes 1 ms."
    measured = 0

    def __init__(self, device: torch.device, quick: bool = False):
        pass

    def __call__(self, *works: Any) -> list[Timing]:
        type(self).measured += 1
        for work in works:
            work()
        return [Timing(ms / 1e3, ms / 1e3, ms / 1e3) for ms in (1.0, *self.ms)]


def measure_steps(clock: type[Clock]) -> Any:
    """In the place of StepTrial.measure."""

    def measure(self: Any, contexts: Any) -> list[StepCost]:
        return [StepCost(1.0), *[StepCost(clock.step_ms)] * (len(contexts) - 1)]

    return measure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Clock]:
    """`auto` on the CPU, with times that a test sets, and a cache of its own."""

    class Own(Clock):
        measured = 0

    monkeypatch.setattr("forge_speed.kernels.Stopwatch", Own)
    monkeypatch.setattr(StepTrial, "measure", measure_steps(Own))
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Own


def net(task: Any) -> Any:
    return task.net


def ran() -> list[str]:
    return [name for name, _ in CALLS]
