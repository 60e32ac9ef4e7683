"""A single process that does not come back from its own step or loader: its stack is shown, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge_doctor.first_look import FirstLook
from forge_doctor.stalled import StallWatch
from tests.support.patience import PATIENCE
from tests.support.patients import Healthy, splits

LIMIT = 0.05


class Gate(logging.Handler):
    """Holds whoever waits until the warning has come; the test never hangs for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.texts = threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if "The main thread is here" in record.getMessage():
            self.texts.append(record.getMessage())
            self.opened.set()

    def wait(self) -> None:
        assert self.opened.wait(PATIENCE), "nothing was said"


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    logging.getLogger("forge").addHandler(found)
    yield found
    logging.getLogger("forge").removeHandler(found)


class Waits(Healthy):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.wait = gate.wait

    def training_step(self, batch: Any) -> Any:
        self.wait()
        return super().training_step(batch)


def fit(task: Any, train: Any, stalled: float) -> None:
    plugins = [FirstLook(stalled=stalled)]
    forge.Trainer(max_updates=2, plugins=plugins, device="cpu", run_dir=False, allow_inexact=True).fit(task, train)


def never_serves(gate: Gate) -> Iterator[Any]:
    gate.wait()
    yield from splits()[0]


class Slow:
    """A loader whose first batch does not come."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __iter__(self) -> Iterator[Any]:
        return never_serves(self.gate)


@pytest.mark.parametrize("place", ["training_step: self.wait()", "never_serves: gate.wait()"])
def test_a_fit_that_does_not_move_shows_its_stack_once(gate: Gate, place: str) -> None:
    waits = "training_step" in place
    task = Waits(gate) if waits else Healthy()
    fit(task, splits()[0] if waits else Slow(gate), LIMIT)
    (text,) = gate.texts
    assert text.startswith("Still in the first step after ")
    assert place in text
    assert "Ctrl-C" in text
    assert not [thread for thread in threading.enumerate() if thread.name == "forge-stall-watch"]


def run_at(update: int) -> Any:
    """A run that has come so far."""
    return SimpleNamespace(
        progress=SimpleNamespace(update=update), step=SimpleNamespace(micro=0), evaluated=0, resumed_from=0
    )


def test_after_the_first_update_it_compares_with_the_longest_before(gate: Gate) -> None:
    watch = StallWatch(run_at(3), LIMIT)
    gate.wait()
    watch.stop()
    assert gate.texts[0].startswith("Nothing has moved for ")
    assert "gate.wait()" in gate.texts[0]


@pytest.mark.parametrize("stalled", [0.0, 60.0])
def test_a_healthy_fit_says_nothing(gate: Gate, stalled: float) -> None:
    fit(Healthy(), splits()[0], stalled)
    assert not gate.texts
