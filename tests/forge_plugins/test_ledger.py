"""ledger: what each plugin costs, exactly, under a clock that only moves when it is told to."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge_plugins import Clip, Ledger
from tests.support.tasks import Classifier, fit, make_batches
from tests.support.throughput_kit import Sink

TICK = 10
"""Nanoseconds that reading the clock takes."""


class Clock:
    """Nanoseconds that pass when somebody spends them, and a few when somebody looks."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += TICK
        return self.now

    def spend(self, us: float) -> None:
        self.now += round(us * 1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("forge_plugins.ledger.timers.clock", clock)
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
    ledger = Ledger()
    fit(plugins=[ledger, *plugins], train=make_batches(updates), **options)
    assert ledger.report is not None
    return ledger.report


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
        assert r["us_per_update"] == pytest.approx(us, abs=0.01)
        assert r["worst_us"] == pytest.approx(us, abs=0.01)
        assert r["calls_per_update"] == 1


def test_a_wrapper_costs_what_it_does_around_its_yield(clock: Clock) -> None:
    report = measured(Spender(clock, "outer", train_step=(20, 30)), Spender(clock, "inner", train_step=(7, 0)))
    assert row(report, "outer", "train_step")["us_per_update"] == pytest.approx(50, abs=0.05)
    assert row(report, "inner", "train_step")["us_per_update"] == pytest.approx(7, abs=0.05)


def test_what_a_plugin_calls_of_others_is_theirs(clock: Clock) -> None:
    class Speaker(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            clock.spend(3)
            step.trainer.publish({"x": 1.0})

    report = measured(Speaker(), Spender(clock, "sink", log=200))
    assert row(report, "speaker", "step_end")["us_per_update"] == pytest.approx(3, abs=0.05)
    assert row(report, "sink", "log")["us_per_update"] > 199


def test_what_timing_costs_is_taken_off(clock: Clock) -> None:
    report = measured(Spender(clock, step_end=0, train_step=(0, 0)))
    assert report["total_us"] == pytest.approx(0, abs=0.001)
    assert report["timers_us"] == pytest.approx((2 + 4) * TICK / 1000, abs=0.001)


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

    ledger, spender = Ledger(), Spender(clock, step_end=250)
    fit(
        slow(clock),
        Loader(make_batches(5)),
        make_batches(2),
        plugins=[ledger, spender],
        validate_every="1 updates",
        allow_inexact=True,
    )
    assert ledger.report is not None
    assert ledger.report["updates"] == 4
    assert ledger.report["update_us"] == pytest.approx(1250, abs=2)
    assert ledger.report["data_wait_us"] == pytest.approx(70, abs=2)
    assert ledger.report["validation_us"] == pytest.approx(600, abs=2)
    assert ledger.report["total_share"] == pytest.approx(0.2, abs=0.001)


# -- what is told -----------------------------------------------------------------------------------------------------


def test_every_log_holds_what_each_plugin_took_in_its_interval(clock: Clock) -> None:
    class Dearer(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            clock.spend(100 if step.index < 4 else 300)

    sink = Sink()
    fit(slow(clock), make_batches(8), plugins=[Dearer(), Ledger(), sink], log_every=4)
    assert sink.logs[4]["ledger/dearer"] == pytest.approx(100, abs=0.1)
    assert sink.logs[8]["ledger/dearer"] == pytest.approx(300, abs=0.1)
    assert sink.logs[8]["ledger/total_share"] == pytest.approx(300 / 1300, rel=0.01)
    assert sink.logs[8]["ledger/sink"] == pytest.approx(0, abs=0.01)


def test_the_table_is_logged_and_written_to_the_run_folder(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    report = measured(Spender(clock, step_end=500), run_dir=tmp_path)
    assert json.loads((tmp_path / "ledger.json").read_text()) == report
    table = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("ledger: "))
    assert "4 updates of 500 µs on average, logs and saves included; plugins take 500.0 µs of each" in table
    assert "spender  step_end      1      500.0" in table


# -- nothing else changes ---------------------------------------------------------------------------------------------


def test_a_default_action_is_not_timed() -> None:
    trainer = forge.Trainer(plugins=[Ledger(), Clip()], max_epochs=1, run_dir=False)
    trainer.fit(Classifier(), make_batches())
    assert trainer.hooks.forge_backward == trainer.core.forge_backward


class Trips(forge.Plugin):
    """Raises where it is told to."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def _trip(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError(where)

    @forge.hookimpl
    def forge_step_end(self) -> None:
        self._trip("step_end")

    @forge.hookimpl(wrapper=True)
    def forge_backward(self) -> Generator[None, Any, Any]:
        self._trip("before backward")
        result = yield
        self._trip("after backward")
        return result

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except ZeroDivisionError:
            self._trip("train_step")
            raise


@pytest.mark.parametrize("where", ["step_end", "before backward", "after backward"])
def test_an_error_in_a_timed_plugin_is_attributed_to_it(where: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        fit(plugins=[Ledger(), Trips(where), Clip()])
    assert f"plugin 'trips', hook forge_{where.split()[-1]}, at update" in caught.value.__notes__[0]


def test_the_trainer_is_handed_back_as_it_was() -> None:
    for plugins in ([Ledger()], [Ledger(), Trips("step_end")]):
        trainer = forge.Trainer(plugins=plugins, max_epochs=1, run_dir=False)
        with contextlib.suppress(ZeroDivisionError):
            trainer.fit(Classifier(), make_batches())
        assert trainer.instrument is None


def test_a_traced_run_is_not_measured_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    trainer = forge.Trainer(plugins=[ledger], max_epochs=1, run_dir=False)
    trainer.trace = lambda text: None
    trainer.fit(Classifier(), make_batches())
    assert ledger.report is None
    assert "measures nothing while every call is traced" in caplog.text
