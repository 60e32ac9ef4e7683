"""A fit by the recipe `default` calls the user's step as often as a loop does, and shows his code what a loop shows."""

from __future__ import annotations

import os
from collections import Counter
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.testing.purity import difference, view
from forge.util.apart import can_fork
from tests.support.patients import Healthy, loader, numbers, splits

UPDATES = 200
IN_GLOBAL = [0]
IN_CONTEXT: ContextVar[int] = ContextVar("calls", default=0)


class CountingKind(type(Healthy)):
    calls = 0


def counter() -> Any:
    calls = [0]

    def count() -> int:
        calls[0] += 1
        return calls[0]

    return count


class Counted(Healthy, metaclass=CountingKind):
    """Counts the calls of its step wherever a step can reach."""

    on_class = 0
    in_closure = staticmethod(counter())

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.last = 0

    def training_step(self, batch: Any) -> Any:
        type(self).on_class += 1
        CountingKind.calls += 1
        IN_GLOBAL[0] += 1
        IN_CONTEXT.set(IN_CONTEXT.get() + 1)
        self.last = type(self).in_closure()
        with self.file.open("a") as file:
            print(os.getpid(), file=file)
        return super().training_step(batch)


def trainer(folder: Path, **options: Any) -> forge.Trainer:
    options = {"max_epochs": None, "max_updates": UPDATES, "device": "cpu", "seed": 0, **options}
    return forge.Trainer(recipe="default", run_dir=folder / "run", **options)


@pytest.mark.skipif(not can_fork(), reason="a process cannot be copied here")
def test_a_step_is_called_once_for_each_update_and_four_times_at_most_in_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORGE_REHEARSE")
    task = Counted(tmp_path / "calls.txt")
    trainer(tmp_path).fit(task, loader(*numbers(640)), splits()[1])
    calls = Counter(int(line) for line in task.file.read_text().split())
    assert calls.pop(os.getpid()) == UPDATES
    assert sum(calls.values()) <= 4
    counted = (Counted.on_class, CountingKind.calls, IN_GLOBAL[0], IN_CONTEXT.get(), task.last)
    assert counted == (UPDATES,) * len(counted)


class Fails(Healthy):
    """Raises in one of the calls of its step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.calls = [0]
        self.at = at

    def training_step(self, batch: Any) -> Any:
        self.calls[0] += 1
        if self.calls[0] == self.at:
            raise RuntimeError(f"call {self.at}")
        return super().training_step(batch)


@pytest.mark.parametrize("at", [1, 3, 20])
def test_an_error_of_any_call_ends_the_fit(tmp_path: Path, at: int) -> None:
    task = Fails(at)
    with pytest.raises(RuntimeError, match=f"call {at}"):
        trainer(tmp_path, max_updates=30).fit(task, *splits())
    assert task.calls == [at]


def test_the_users_code_sees_what_the_bare_loop_shows(tmp_path: Path) -> None:
    plugins = list(trainer(tmp_path).stack)
    bare, seen = view([]), view(plugins)
    assert difference(bare, seen, {effect for plugin in plugins for effect in plugin.effects}) == ""
