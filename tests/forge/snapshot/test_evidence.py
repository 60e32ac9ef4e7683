"""A trace sees whatever a run is made of, and comparing two of them names the cause before its effects."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.contract.plugin import Callback
from forge.data import Loader
from forge.snapshot.evidence import (
    BATCH,
    MEANS,
    NUMBERS,
    OPTIMIZER,
    UNSAVED,
    WEIGHTS,
    attempts_apart,
    read_traces,
    traced,
)
from forge.testing import TinyTask, fit_tiny, tiny_batches
from forge.twin.compare import differences
from forge.twin.record import Record

KINDS = {"batch": BATCH, "hidden": UNSAVED, "rng": NUMBERS, "means": MEANS, "weights": WEIGHTS, "optimizer": OPTIMIZER}
"""The kinds of marks, as a run makes them in an update."""


def run(**values: dict[int, str]) -> Record:
    """A record of three updates, in which a kind has another value at some of them."""
    record = Record()
    for update in (1, 2, 3):
        for name, kind in KINDS.items():
            record.mark(f"its {name}", values.get(name, {}).get(update, "a"), update, kind, aside=name == "hidden")
    return record


def since(record: Record, update: int) -> Record:
    return record.where(lambda mark: (mark.update or 0) >= update)


# -- compare ----------------------------------------------------------------------------------------------------------


def test_a_hidden_attribute_that_differs_alone_has_not_shown_yet() -> None:
    difference = attempts_apart(run(), [run(hidden={2: "b"})])
    assert difference is not None
    assert (difference.update, difference.path, difference.aside) == (2, "its hidden", True)
    assert attempts_apart(run(), [run(hidden={2: "b"})], [difference]) is None


def test_what_shows_in_a_later_attempt_comes_before_what_drifted_alone() -> None:
    first = run(hidden={2: "b"}).where(lambda mark: (mark.update or 0) < 3)
    difference = attempts_apart(run(), [first, since(run(weights={3: "b"}), 2)])
    assert difference is not None
    assert (difference.update, difference.kind, difference.aside) == (3, WEIGHTS, False)


def test_an_attempt_may_repeat_updates_and_be_cut_by_a_kill() -> None:
    cut = Record.of(run().marks[:-2])
    assert attempts_apart(run(), [run(), since(run(), 2)]) is None
    assert attempts_apart(run(), [cut, since(run(), 2)]) is None
    assert (
        str(attempts_apart(run(), [run(), cut])) == f"at update 3, in {WEIGHTS} (its weights): only the second has it"
    )


def test_an_update_that_no_attempt_made_differs() -> None:
    ended = run().where(lambda mark: mark.update != 3)
    assert str(attempts_apart(run(), [ended])) == f"at update 3, in {BATCH} (its batch): only the second has it"


def test_an_update_the_straight_run_never_made_differs() -> None:
    straight = run().where(lambda mark: mark.update != 3)
    assert str(attempts_apart(straight, [run()])) == f"at update 3, in {BATCH} (its batch): only the first has it"


# -- what a run leaves ------------------------------------------------------------------------------------------------


def recorder(folder: Path) -> Callback:
    folder.mkdir(exist_ok=True)
    return traced(folder)


COUNTER, LOG, RNG = 0, [1], random.Random(1)
"""Globals of the module of `Knows`."""


class Annealing:
    def __init__(self) -> None:
        self.rate = 1.0


class Knows(TinyTask):
    """A task with state in every place that a trace looks at."""

    def __init__(self) -> None:
        super().__init__()
        self._count, self.annealing, self.rng = 0, Annealing(), np.random.default_rng(1)
        self.changes = lambda: None

    def training_step(self, batch: Any) -> Any:
        self.changes()
        loss = super().training_step(batch)
        return loss if COUNTER >= 0 and LOG and RNG else None


def count_globally() -> None:
    global COUNTER
    COUNTER += 1


class Stateful(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.ones(6), 1


CHANGES: dict[str, Any] = {
    "task._count": lambda task, data: setattr(task, "_count", task._count + 1),
    "task.annealing.rate": lambda task, data: setattr(task.annealing, "rate", task.annealing.rate / 2),
    "task.rng": lambda task, data: task.rng.random(),
    f" (global {__name__}.COUNTER)": lambda task, data: count_globally(),
    f" (global {__name__}.LOG)[0]": lambda task, data: LOG.__setitem__(0, LOG[0] + 1),
    f" (global {__name__}.RNG)": lambda task, data: RNG.random(),
    "train dataset.reads": lambda task, data: setattr(data, "reads", data.reads + 1),
}


@pytest.mark.parametrize("place", CHANGES)
def test_a_trace_sees_what_drifts_and_names_its_place(tmp_path: Path, place: str) -> None:
    for name in "ab":
        task, data = Knows(), Stateful()
        if name == "b":
            task.changes = lambda task=task, data=data: CHANGES[place](task, data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "COUNTER", 0)
            patch.setattr(sys.modules[__name__], "LOG", [1])
            RNG.seed(1)
            fit_tiny([recorder(tmp_path / name)], task=task, train=Loader(data, 4), val=tiny_batches())
    (one,), (other,) = (read_traces(tmp_path / name) for name in "ab")
    found = [each for each in differences(other.marks, one.marks) if each.update == 1]
    kind = NUMBERS if "rng" in place.lower() else UNSAVED
    assert any(each.path.endswith(place) for each in found if each.kind == kind)


def test_two_equal_runs_leave_equal_traces(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit_tiny([recorder(tmp_path / name)], seed=seed)
    a, b, c = (read_traces(tmp_path / name)[0] for name in "abc")
    assert a.updates == list(range(1, 11))
    assert a.marks == b.marks
    causes_first = [BATCH, NUMBERS, MEANS, WEIGHTS, OPTIMIZER]
    assert [*dict.fromkeys(mark.kind for mark in a.marks if not mark.aside)] == causes_first
    assert attempts_apart(a, [c]) is not None


def test_the_place_of_another_batch_is_named(tmp_path: Path) -> None:
    fit_tiny([recorder(tmp_path / "a")])
    (record,) = read_traces(tmp_path / "a")
    assert [m.path for m in record.marks if m.kind == BATCH][:2] == ["micro-batch 0, part 0", "micro-batch 0, part 1"]
    place = next(i for i, m in enumerate(record.marks) if m.update == 4 and m.path == "micro-batch 0, part 1")
    other = Record.of([*record.marks[:place], replace(record.marks[place], digest="x"), *record.marks[place + 1 :]])
    assert str(attempts_apart(record, [other])) == "at update 4, in the batch (micro-batch 0, part 1)"


def test_each_attempt_has_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        fit_tiny([recorder(tmp_path)], max_updates=2)
    assert [record.updates for record in read_traces(tmp_path)] == [[1, 2], [1, 2]]
    assert read_traces(tmp_path / "nowhere") == []
