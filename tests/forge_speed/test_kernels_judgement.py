"""The verdict on a whole step: which kernels it keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from forge_speed.kernels.judgement import StepCost, StepVerdict, judge

WRITTEN = frozenset[str]()


class Steps:
    """Measured steps: ms and bytes by the kernels in them."""

    def __init__(self, costs: dict[str, tuple[float, int]]):
        self.costs = {frozenset(names.split()): StepCost(ms, peak) for names, (ms, peak) in costs.items()}
        self.asked: list[list[str]] = []

    def __call__(self, sets: Sequence[frozenset[str]]) -> list[StepCost]:
        self.asked.append([" ".join(sorted(names)) for names in sets])
        return [self.costs[names] for names in sets]


@pytest.mark.parametrize(
    ("costs", "kept"),
    [
        ({"": (100, 10), "a b": (97, 10), "a": (99, 10), "b": (98.5, 10)}, ("a", "b")),
        ({"": (100, 10), "a b": (97, 10), "a": (95, 10), "b": (103, 10)}, ("a",)),
        ({"": (100, 10), "a b": (99, 10), "a": (99.5, 10), "b": (99, 10)}, ()),
        ({"": (100, 10), "a b": (99, 10), "a": (90, 10), "b": (110, 10)}, ("a",)),
        ({"": (100, 10), "a b": (90, 20), "a": (95, 10), "b": (93, 20)}, ("a",)),
        ({"": (100, 10), "a b": (99, 10), "a": (95, 10), "b": (94, 10)}, ("b",)),
    ],
    ids=["together", "without the slow one", "none", "one", "memory", "best alone"],
)
def test_only_what_wins_is_kept(costs: dict[str, tuple[float, int]], kept: tuple[str, ...]) -> None:
    verdict = judge(["a", "b"], Steps(costs))
    assert verdict.kept == kept
    assert verdict.costs is not None
    assert verdict.costs[WRITTEN].ms == 100


def test_those_that_won_alone_are_tried_together() -> None:
    steps = Steps(
        {"": (100, 1), "a b c": (105, 1), "a": (95, 1), "b": (96, 1), "c": (120, 1), "a b": (91, 1)},
    )
    assert judge(["a", "b", "c"], steps).kept == ("a", "b")
    assert steps.asked == [["", "a b c"], ["", "a", "b", "c"], ["", "a b"]]


@pytest.mark.parametrize(("ms", "peak", "kept"), [(99, 8, ("a",)), (99, 10, ()), (100, 8, ()), (103, 2, ())])
def test_less_memory_counts_if_it_costs_no_time(ms: float, peak: int, kept: tuple[str, ...]) -> None:
    assert judge(["a"], Steps({"": (100, 10), "a": (ms, peak)})).kept == kept


def test_a_step_that_fails_is_not_kept() -> None:
    verdict = judge(["a"], lambda sets: [StepCost(1.0), StepCost(math.inf, why_not="it fails: RuntimeError: no")])
    assert verdict.kept == ()
    assert str(verdict) == "as written 1 ms; with a it fails: RuntimeError: no"


def test_a_verdict_is_the_same_after_it_was_written_down() -> None:
    verdict = judge(["a"], Steps({"": (100, 10), "a": (80, 9)}))
    assert StepVerdict.from_data(verdict.as_data()) == verdict
    assert "with a 80 ms" in str(verdict)
