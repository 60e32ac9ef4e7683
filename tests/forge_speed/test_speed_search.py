"""The search for speed: which lever wins, in which order they are added, what is refused, and never slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forge.tuning.step_reading import StepReading
from forge_speed.levers import Change, Lever, LeverSituation, levers
from forge_speed.speed_report import SpeedReport
from forge_speed.speed_search import LeverFailed, SpeedSearch
from forge_speed.step_facts import StepFacts

GB = 10**9


def lever(name: str, numbers: Any = "rounding", **more: Any) -> Lever:
    return Lever(name, Change({name: {}}), numbers, **more)


class Fake:
    """Steps whose time is a product of factors; each measurement takes some seconds of a clock that it owns."""

    def __init__(self, factors: dict[str, float], *, ms: float = 100.0, seconds: float = 1.0, **memory: int):
        self.factors, self.ms, self.seconds, self.memory = factors, ms, seconds, memory
        self.now = 0.0
        self.calls: list[tuple[str, ...]] = []
        self.fails: dict[str, str] = {}
        self.other_bits: set[str] = set()
        self.override: Callable[[tuple[str, ...]], float | None] = lambda names: None

    def __call__(self, chosen: Sequence[Lever]) -> StepReading:
        names = tuple(lever.name for lever in chosen)
        self.now += self.seconds
        self.calls.append(names)
        for name in names:
            if name in self.fails:
                raise LeverFailed(self.fails[name])
        ms = self.override(names)
        if ms is None:
            ms = self.ms
            for name in names:
                ms *= self.factors.get(name, 1.0)
        memory = sum(self.memory.get(name, 0) for name in ("start", *names))
        return StepReading(ms, memory, 0.0, not self.other_bits & set(names))

    def search(self, *given: Lever, **options: Any) -> SpeedReport:
        return SpeedSearch(self, given, clock=lambda: self.now, **options).run()


def names(report: SpeedReport) -> list[str]:
    return [lever.name for lever in report.chosen]


def why_not(report: SpeedReport) -> dict[str, str]:
    return {row.lever.name: row.why_not for row in report.rows}


def test_winners_are_added_by_their_gain_the_rest_is_named() -> None:
    fake = Fake({"a": 0.9, "b": 0.5, "c": 1.4, "d": 0.995})
    report = fake.search(*map(lever, "abcd"))
    assert names(report) == ["b", "a"]
    assert report.best is not None
    assert report.best.ms == pytest.approx(45)
    assert report.speedup == pytest.approx(100 / 45)
    assert why_not(report) == {"a": "", "b": "", "c": "slower", "d": "no gain with the others"}
    assert report.change.plugins == {"b": {}, "a": {}}
    assert [row.chosen for row in report.rows] == [True, True, False, False]


def test_a_lever_must_gain_with_the_others_too() -> None:
    fake = Fake({"a": 0.5, "b": 0.6})
    fake.override = lambda names: 50.0 if set(names) == {"a", "b"} else None
    report = fake.search(*map(lever, "ab"))
    assert names(report) == ["a"]
    assert why_not(report)["b"] == "no gain with the others"


def test_of_a_group_only_the_fastest_is_used() -> None:
    fake = Fake({"whole": 0.7, "blocks": 0.5, "other": 0.9})
    report = fake.search(lever("whole", group="compile"), lever("blocks", group="compile"), lever("other"))
    assert sorted(names(report)) == ["blocks", "other"]
    assert all(not {"whole", "blocks"} <= set(call) for call in fake.calls)


def test_another_of_its_group_replaces_one_if_that_is_faster() -> None:
    fake = Fake({"whole": 0.5, "graph": 0.8, "blocks": 0.9})
    fake.override = lambda names: 20.0 if set(names) == {"graph", "blocks"} else None
    report = fake.search(lever("whole", group="compile"), lever("graph"), lever("blocks", group="compile"))
    assert sorted(names(report)) == ["blocks", "graph"]
    assert why_not(report)["whole"] == "blocks is faster"


def test_a_failure_is_listed_and_the_search_goes_on() -> None:
    fake = Fake({"a": 0.5, "b": 0.4})
    fake.fails["b"] = "RuntimeError: no such kernel"
    report = fake.search(lever("b"), lever("a"))
    assert names(report) == ["a"]
    assert why_not(report)["b"] == "RuntimeError: no such kernel"


def test_memory_stays_within_the_limit() -> None:
    fake = Fake({"a": 0.5, "b": 0.6}, start=10 * GB, a=5 * GB)
    report = fake.search(lever("a"), lever("b"), limit=12 * GB)
    assert names(report) == ["b"]
    assert why_not(report)["a"] == "over the limit of 12 GB"
    assert report.fits


def test_the_answer_is_dropped_if_it_loses_at_the_end() -> None:
    fake = Fake({"a": 0.5})
    fake.override = lambda names: 101.0 if names and fake.calls.count(("a",)) > 2 else None  # measured twice alone
    report = fake.search(lever("a"))
    assert names(report) == []
    assert report.best is None
    assert report.dropped == "a"
    assert why_not(report)["a"] == "no gain in the end"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [("precision", ["short", "round", "same"]), ("rounding", ["round", "same"]), ("bitwise", ["same"])],
)
def test_only_permitted_changes_of_the_numbers_are_tried(numbers: Any, expected: list[str]) -> None:
    fake = Fake({"short": 0.3, "round": 0.5, "same": 0.9})
    given = [lever("short", "precision"), lever("round"), lever("same", "bitwise")]
    report = fake.search(*given, numbers=numbers)
    assert names(report) == expected
    assert {name for call in fake.calls for name in call} == set(expected)


def test_a_promise_of_equal_bits_is_verified() -> None:
    fake = Fake({"graph": 0.5, "ahead": 0.9})
    fake.other_bits = {"graph"}
    given = [lever("graph", "bitwise"), lever("ahead", "bitwise")]
    report = fake.search(*given, numbers="bitwise")
    assert names(report) == ["ahead"]
    assert why_not(report)["graph"] == "other bits"
    assert {row.lever.name: row.numbers for row in report.rows} == {"graph": "rounding", "ahead": "bitwise"}


def test_the_budget_ends_the_search_with_the_best_so_far() -> None:
    fake = Fake({"a": 0.5, "b": 0.1}, seconds=10.0)
    report = fake.search(lever("a"), lever("b"), budget=30.0)
    assert names(report) == ["a"]
    assert report.spent
    assert why_not(report)["b"] == "the budget was spent"
    assert report.best is not None


def test_noise_raises_the_bar() -> None:
    fake = Fake({"a": 0.95})
    starts = iter([100.0, 109.0, 92.0] * 9)
    fake.override = lambda names: 95.0 if names else next(starts)
    report = fake.search(*map(lever, "ab"))
    assert report.noise > 0.05
    assert why_not(report) == {"a": "no gain", "b": "no gain"}


# -- which levers apply -----------------------------------------------------------------------------------------------

EVERYTHING = (
    *("accumulate", "amp", "backends", "channels_last", "compile", "cuda_graph", "fused_optimizer", "kernels"),
    *("prefetch", "remat"),
)


def found(situation: LeverSituation) -> dict[str, str]:
    return {lever.name: lever.why_not for lever in levers(situation)}


def applying(situation: LeverSituation) -> set[str]:
    return {name for name, why_not in found(situation).items() if not why_not}


def test_a_cpu_gets_what_works_there() -> None:
    facts = StepFacts(blocks=("Block",), convolutions=True, batch_norm=True)
    situation = LeverSituation(facts, installed=EVERYTHING)
    assert applying(situation) == {"amp bf16", "compile", "compile by block", "fused_optimizer", "channels_last"}
    assert found(situation)["cuda_graph"] == "needs CUDA"


def test_a_gpu_gets_everything() -> None:
    facts = StepFacts("cuda", blocks=("Block",), convolutions=True, attention=True)
    applied = applying(LeverSituation(facts, data={"batch_size": 32, "workers": 0}, installed=EVERYTHING, cores=4))
    assert applied >= {"TF32", "cuDNN benchmark", "attention flash", "cuda_graph", "kernels", "prefetch"}
    assert applied >= {"compile reduce-overhead", "compile max-autotune-no-cudagraphs", "micro-batch 16"}
    assert {name for name in applied if name.startswith("workers")} == {"workers 1", "workers 2", "workers 4"}


def test_the_users_choice_wins() -> None:
    given = {"compile": {"mode": "default"}, "amp": {"dtype": "fp16"}}
    situation = LeverSituation(StepFacts("cuda"), given=given, installed=EVERYTHING, leave_out=["kernels", "TF32"])
    reasons = found(situation)
    assert reasons["compile"] == reasons["amp bf16"] == "your stack has it"
    assert reasons["kernels"] == reasons["TF32"] == "left out"
    assert not [name for name in applying(situation) if name.startswith("compile")]


def test_merged_micro_batches_keep_the_global_batch() -> None:
    situation = LeverSituation(
        StepFacts(window=4), given={"accumulate": {"window": 4}}, data={"batch_size": 8}, installed=EVERYTHING
    )
    (merged,) = [lever for lever in levers(situation) if lever.name == "micro-batch 16"]
    assert merged.change == Change({"accumulate": {"window": 2}}, {"batch_size": 16})


def test_an_optimizer_that_chooses_its_step_is_left_alone() -> None:
    situation = LeverSituation(StepFacts(not_fused="Adam chooses its step itself"), installed=EVERYTHING)
    assert found(situation)["fused_optimizer"] == "Adam chooses its step itself"
