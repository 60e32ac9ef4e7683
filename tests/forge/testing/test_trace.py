"""A trace sees whatever a run is made of, and comparing two of them names the cause before its effects."""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forge.data import Loader
from forge.snapshot.evidence import Line, compare, digest
from forge.testing import TinyTask, fit_tiny, tiny_batches
from forge.testing.trace import Recorder, read_trace


def line(update: int, **parts: Any) -> Line:
    """A line of a trace, with what is of no interest."""
    quiet = {"batch": {"micro-batch 0": "a"}, "rng": {"torch": "a"}, "means": {"loss": "a"}, "hidden": {"count": "1"}}
    return {"update": update, **quiet, "weights": {"w": "a"}, "optimizer": {"optimizer": "a"}, **parts}


STRAIGHT = [line(1), line(2), line(3)]


# -- compare ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["batch", "rng", "means", "weights", "optimizer"])
def test_a_difference_is_named_by_update_and_part(part: str) -> None:
    name = next(iter(line(2)[part]))
    difference = compare(STRAIGHT, [line(1), line(2, **{part: {name: "b"}}), line(3, weights={"w": "b"})])
    assert difference is not None
    assert (difference.update, difference.part, difference.detail) == (2, part, name)
    assert str(difference).startswith("at update 2, in the ")


def test_causes_come_before_effects() -> None:
    parts = ["batch", "rng", "means", "weights", "optimizer"]
    for i, first in enumerate(parts):
        difference = compare(STRAIGHT, [line(1, **{part: {"x": "b"} for part in parts[i:]})])
        assert difference is not None
        assert difference.part == first


def test_a_hidden_attribute_that_differs_too_is_the_cause() -> None:
    difference = compare(STRAIGHT, [line(2, means={"loss": "b"}, hidden={"count": "0"})])
    assert difference is not None
    assert (difference.part, difference.detail) == ("hidden", "count")
    assert "a value outside the task's state (count)" in str(difference)


def test_a_hidden_attribute_that_differs_alone_has_not_shown_yet() -> None:
    difference = compare(STRAIGHT, [line(1), line(2, hidden={"count": "0"}), line(3)])
    assert difference is not None
    assert (difference.update, difference.part, difference.detail, difference.shown) == (2, "hidden", "count", False)


def test_what_shows_later_comes_before_what_drifted_alone() -> None:
    difference = compare(STRAIGHT, [line(2, hidden={"count": "0"}), line(3, weights={"w": "b"})])
    assert difference is not None
    assert (difference.update, difference.part, difference.shown) == (3, "weights", True)


def test_an_update_the_straight_run_never_made_differs() -> None:
    difference = compare(STRAIGHT, [line(3), line(4)])
    assert difference is not None
    assert (difference.update, difference.detail) == (4, "the uninterrupted run has no such update")


# -- digest -----------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int
    more: list[int] = field(default_factory=list)


class Plain:
    def __init__(self, x: Any):
        self.x = x


class Other(Plain):
    pass


DIFFERENT = [
    (np.zeros(3), np.ones(3)),
    (np.zeros(4), np.zeros((2, 2))),
    (np.zeros(1, np.int32), np.zeros(1, np.float32)),
    (np.float32(1), np.float32(2)),
    (np.array([Plain(1)]), np.array([Plain(2)])),
    (torch.zeros(2), -torch.zeros(2)),
    (Point(1), Point(2)),
    (Point(1, [2]), Point(1, [3])),
    ({1, 2}, {1, 3}),
    (Plain(1), Plain(2)),
    (Plain([np.zeros(1)]), Plain([np.ones(1)])),
    (Plain(1), Other(1)),
    (nn.Linear(2, 2), nn.Linear(2, 2)),
    ([1, 23], [12, 3]),
    ([1, [2]], [[1], 2]),
    ({"a": 1}, {"a": 2}),
    (object(), iter(())),
    (len, max),
    (Plain, Other),
    ([], None),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_a_digest_sees_what_differs(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest([one]) != digest([other])


@pytest.mark.parametrize("value", [pair[0] for pair in DIFFERENT if not isinstance(pair[0], type(len))])
def test_a_copy_has_the_same_digest(value: Any) -> None:
    assert digest(copy.deepcopy(value)) == digest(value)


def test_a_value_that_holds_itself_has_a_digest() -> None:
    one, other = Plain(1), Plain(2)
    one.me, other.me = one, other  # pyright: ignore[reportAttributeAccessIssue]
    assert digest(one) != digest(other)


# -- what a run leaves ------------------------------------------------------------------------------------------------


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
            fit_tiny([Recorder(tmp_path / name)], task=task, train=Loader(data, 4), val=tiny_batches())
    difference = compare(*(read_trace(tmp_path / name) for name in "ab"))
    assert difference is not None
    assert difference.update == 1
    part = "rng" if "rng" in place.lower() else "hidden"
    lines = [read_trace(tmp_path / name)[0][part] for name in "ab"]
    assert any(path.endswith(place) for path in lines[0] if lines[0][path] != lines[1][path])


def test_two_equal_runs_leave_equal_traces(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit_tiny([Recorder(tmp_path / name)], seed=seed)
    a, b, c = (read_trace(tmp_path / name) for name in "abc")
    assert [line["update"] for line in a] == list(range(1, 11))
    assert a == b
    assert compare(a, c) is not None


def test_the_place_of_another_batch_is_named(tmp_path: Path) -> None:
    fit_tiny([Recorder(tmp_path / "a")])
    lines = read_trace(tmp_path / "a")
    assert list(lines[0]["batch"]) == ["micro-batch 0, part 0", "micro-batch 0, part 1"]
    other = copy.deepcopy(lines)
    other[3]["batch"]["micro-batch 0, part 1"] = "x"
    assert str(compare(lines, other)) == "at update 4, in the batch (micro-batch 0, part 1)"


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    fit_tiny([Recorder(tmp_path / "a")])
    with (tmp_path / "a").open("a") as file:
        file.write('{"update": 11, "ba')
    assert len(read_trace(tmp_path / "a")) == 10
    assert read_trace(tmp_path / "nowhere") == []
