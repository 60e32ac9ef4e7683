"""Workers that are forked collect nothing of the main process, and their own garbage from their start on."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from forge.data import Loader, workers
from forge.util import fork_garbage

COLLECTED: Counter[int] = Counter()
"""Collections, by process."""
AT_START = [-1]
"""Those of this process when it began to collect."""


class Sees(Dataset[Any]):
    """One sample: what this process has collected, and whether it goes on to."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return [*AT_START, COLLECTED[os.getpid()], gc.isenabled()]


class Cycle:
    """Garbage that only a collection finds; it writes down where that was."""

    def __init__(self, log: Path):
        self.log, self.itself = log, self

    def __del__(self) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collect at nearly every new object."""
    monkeypatch.setattr(workers, "leave_inherited", begin)
    before = gc.get_threshold()
    COLLECTED.clear()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    yield
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def note(phase: str, info: dict[str, int]) -> None:
    COLLECTED[os.getpid()] += phase == "start"


def begin() -> None:
    AT_START[:] = [COLLECTED[os.getpid()]]
    fork_garbage.leave_inherited()


def make_objects(worker: int) -> None:
    [[] for _ in range(10)]


def collect(worker: int) -> None:
    gc.collect()


def first(rows: list[Any]) -> Any:
    return rows[0]


def seen(init: Any = make_objects, **options: Any) -> list[Any]:
    return next(iter(Loader(Sees(), 1, num_workers=1, worker_init_fn=init, collate_fn=first, **options)))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_worker_collects_nothing_until_it_begins_and_then_as_ever(eager: None, persistent: bool) -> None:
    at_start, later, goes_on = seen(persistent_workers=persistent)
    assert at_start == 0
    assert later > 0
    assert goes_on
    assert gc.isenabled()


def test_who_has_switched_collections_off_finds_them_off(no_collections: None) -> None:
    assert seen()[2] is False
    assert not gc.isenabled()


def test_a_worker_never_collects_what_it_inherited(no_collections: None, tmp_path: Path) -> None:
    Cycle(tmp_path / "found in")
    seen(collect)
    gc.collect()
    assert (tmp_path / "found in").read_text() == f"{os.getpid()}\n"


def start_in_vain() -> None:
    with fork_garbage.collections_paused():
        with fork_garbage.collections_paused():
            pass
        raise KeyError(gc.isenabled())


def test_collections_go_on_after_a_start_that_fails_and_one_inside_another() -> None:
    with pytest.raises(KeyError, match="False"):
        start_in_vain()
    assert gc.isenabled()
