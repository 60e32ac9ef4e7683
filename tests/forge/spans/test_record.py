"""What each implementation of each hook takes, exactly, under a clock that only moves when it is told to."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge_plugins import Spans
from tests.support.spans_kit import Sink
from tests.support.tasks import Classifier, fit, make_batches


class Clock:
    """Nanoseconds that pass when somebody spends them."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def spend(self, us: float) -> None:
        self.now += round(us * 1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("forge.spans.record.clock", clock)
    monkeypatch.setattr("forge.spans.goodput.clock", lambda: clock.now / 1e9)
    monkeypatch.setattr("forge.engine.trainer.time", SimpleNamespace(perf_counter=lambda: clock.now / 1e9))
    return clock


class Spender(forge.Plugin):
    """Spends time in the hooks that it is told of: {hook: µs}; a pair is a wrapper's time before and after."""

    def __init__(self, clock: Clock, name: str = "spender", **times: Any):
        super().__init__()
        self.name = name
        for hook, us in times.items():
            timed = self._wrapper(clock, *us) if isinstance(us, tuple) else self._plain(clock, us)
            setattr(self, f"forge_{hook}", timed)

    @staticmethod
    def _plain(clock: Clock, us: float) -> Any:
        def hook() -> None:
            clock.spend(us)

        return forge.hookimpl(hook)

    @staticmethod
    def _wrapper(clock: Clock, before: float, after: float) -> Any:
        def hook() -> Generator[None, Any, Any]:
            clock.spend(before)
            result = yield
            clock.spend(after)
            return result

        return forge.hookimpl(wrapper=True)(hook)


def measured(*plugins: forge.Plugin, updates: int = 5, **options: Any) -> dict[str, Any]:
    spans = Spans(hooks=True)
    fit(plugins=[*plugins, spans], train=make_batches(updates), **options)
    return spans.report


def row(report: dict[str, Any], plugin: str, hook: str, in_validation: bool = False) -> dict[str, Any]:
    key = (plugin, f"forge_{hook}", in_validation)
    return next(r for r in report["rows"] if (r["plugin"], r["hook"], r["in_validation"]) == key)


# -- what is measured -------------------------------------------------------------------------------------------------


def test_every_hook_of_every_plugin_costs_what_it_spends(clock: Clock) -> None:
    report = measured(Spender(clock, "a", step_end=50, inspect_grads=20), Spender(clock, "b", boundary=5))
    assert [(r["plugin"], r["hook"]) for r in report["rows"]] == [
        ("a", "forge_step_end"),
        ("a", "forge_inspect_grads"),
        ("b", "forge_boundary"),
    ]
    for r, us in zip(report["rows"], [50, 20, 5], strict=True):
        assert r["us_per_update"] == pytest.approx(us, abs=0.001)
        assert r["worst_us"] == pytest.approx(us, abs=0.001)
        assert r["calls_per_update"] == 1


def test_a_wrapper_costs_what_it_does_around_its_yield(clock: Clock) -> None:
    report = measured(Spender(clock, "outer", train_step=(20, 30)), Spender(clock, "inner", train_step=(7, 0)))
    assert row(report, "outer", "train_step")["us_per_update"] == pytest.approx(50, abs=0.001)
    assert row(report, "inner", "train_step")["us_per_update"] == pytest.approx(7, abs=0.001)


def test_what_a_plugin_calls_of_others_is_theirs(clock: Clock) -> None:
    class Speaker(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            clock.spend(3)
            step.trainer.publish({"x": 1.0})

    report = measured(Speaker(), Spender(clock, "sink", log=200))
    assert row(report, "speaker", "step_end")["us_per_update"] == pytest.approx(3, abs=0.001)
    assert row(report, "sink", "log")["us_per_update"] > 199


# -- what an update takes ---------------------------------------------------------------------------------------------


class Slow(Classifier):
    """Each forward takes its time."""

    clock: Clock

    def training_step(self, batch: Any) -> Any:
        self.clock.spend(1000)
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.clock.spend(300)
        return super().training_step(batch)


def slow(clock: Clock) -> Slow:
    task = Slow()
    task.clock = clock
    return task


def test_an_update_is_timed_without_data_and_validation(clock: Clock) -> None:
    class Loader(list[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                clock.spend(70)
                yield batch

    spans, spender = Spans(hooks=True), Spender(clock, step_end=250)
    fit(
        slow(clock),
        Loader(make_batches(5)),
        make_batches(2),
        plugins=[spans, spender],
        validate_every="1 updates",
        allow_inexact=True,
    )
    report = spans.report
    assert report["updates"] == 4
    assert report["update_us"] == pytest.approx(1250)
    assert report["total_share"] == pytest.approx(0.2)
    phases = {name: us for name, us in report["phases_us"].items() if us > 1e-3}
    assert phases == pytest.approx({"data": 70, "forward": 1000, "rest": 250, "evaluate": 600})


# -- what is told -----------------------------------------------------------------------------------------------------


def test_every_log_and_the_run_folder_hold_what_each_plugin_takes(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sink = Sink()
    report = measured(Spender(clock, step_end=500), sink, run_dir=tmp_path, log_every=5)
    assert json.loads((tmp_path / "spans.json").read_text())["hooks"] == report
    assert sink.logs[5]["costs/spender"] == pytest.approx(500)
    assert sink.logs[5]["costs/plugins_share"] == pytest.approx(1.0)
    (table,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("spans: "))
    assert "4 updates of 500 µs on average; plugins take 500.0 µs of each" in table
    assert "spender  step_end      1      500.0" in table


def test_not_asked_for_nothing_is_wrapped() -> None:
    replaced: list[str] = []

    class Looks(forge.Plugin):
        @forge.hookimpl
        def forge_start(self, trainer: forge.Trainer) -> None:
            of_core = (name for name in ("micro_step", "forward", "backward", "optimizer_step"))
            hooks, core = trainer.hooks, trainer.core
            replaced.extend(n for n in of_core if getattr(hooks, f"forge_{n}") != getattr(core, f"forge_{n}"))

    fit(plugins=[Spans(), Looks()])
    assert replaced == []
    fit(plugins=[Spans(hooks=True), Looks()])
    assert replaced == ["forward", "backward", "optimizer_step"]
