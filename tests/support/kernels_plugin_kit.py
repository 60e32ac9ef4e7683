"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.nn.functional as F

from forge import registry
from forge.testing import tiny_batches
from forge_speed.kernels import Kernels
from forge_speed.kernels.judgement import StepCost, StepTrial
from tests.support.toy_kernels import CALLS, LINEAR_ITSELF, entries

RELU_ITSELF, LAYER_NORM_ITSELF = F.relu, F.layer_norm
FOUR: dict[str, Any] = {"train": tiny_batches([8] * 4), "max_updates": 4, "log_every": 1, "validate_every": None}
"""Four updates with one shape, and nothing else."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    CALLS.clear()
    yield
    assert F.relu is RELU_ITSELF
    assert F.linear is LINEAR_ITSELF


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have these toys installed, and nothing else."""
    others = registry.installed

    def install(*names: str) -> None:
        found = entries(*names)
        monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))

    return install


class Clock:
    """What a step takes, as a test says; as written it is 1 ms."""

    ms: float = 0.5
    "With any kernels."
    own: ClassVar[dict[str, float]] = {}
    "With a kernel alone."
    measured = 0
    "How many steps were judged."


def measure_steps(clock: type[Clock]) -> Any:
    """In the place of StepTrial.measure: every variant runs once, and takes what the clock says."""

    def measure(self: StepTrial, contexts: Any) -> list[StepCost]:
        names = [context.args[0] for context in contexts]
        clock.measured += not vars(self).get("is_counted", False)
        vars(self)["is_counted"] = True
        for context in contexts:
            self._seconds(context)
        return [StepCost(clock.own.get(" ".join(sorted(each)), clock.ms) if each else 1.0) for each in names]

    return measure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Clock]:
    """`auto` on the CPU, with times that a test sets, and a cache of its own."""

    class Own(Clock):
        measured = 0

    monkeypatch.setattr(StepTrial, "measure", measure_steps(Own))
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Own


def net(task: Any) -> Any:
    return task.net


def ran() -> list[str]:
    return [name for name, _ in CALLS]
