"""duration and validate_first: when a run ends, and the validation before it begins; smoke runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.errors import ForgeError, RecipeError
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import JSONL, Checkpoint, Duration, EarlyStop, ValidateFirst, duration
from forge_plugins.limit import SMOKE
from tests.forge.snapshot.test_resume import die, live, log_of
from tests.forge_plugins.test_limit import Seen


class Clock:
    """A clock that moves by one second with every update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(duration.time, "monotonic", lambda: self.now)

    def plugin(self) -> forge.Plugin:
        @forge.on("step_end")
        def tick() -> None:
            self.now += 1

        return tick


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# -- max_time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:10:00", 600), ("1:02:03", 3723), ("01:00:00:00", 86400), ("10 min", 600), ("2 h", 7200), (90, 90)],
)
def test_times_as_people_write_them(text: str | int, seconds: float) -> None:
    assert duration.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["10 updates", "soon", "00:00:00", "10", "1:2:3:4:5"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="max_time"):
        forge.Trainer(max_time=text)


def test_a_run_needs_no_other_end_than_time(clock: Clock) -> None:
    trainer = forge.Trainer(max_time="7 s", plugins=[clock.plugin()], run_dir=False)
    result = trainer.fit(TinyTask(), tiny_batches())
    assert (result.updates, result.stop_reason) == (7, "duration: max_time=7 s is over")


def test_a_run_without_any_end_is_refused() -> None:
    with pytest.raises(ForgeError, match="say how long to train"):
        forge.Trainer(plugins=[], run_dir=False).fit(TinyTask(), tiny_batches())


@pytest.mark.slow
def test_the_time_of_all_attempts_counts(clock: Clock, tmp_path: Path) -> None:
    plugins = lambda: [clock.plugin(), Checkpoint("1 updates", background=False)]  # noqa: E731
    straight, expected = live(tmp_path / "straight", plugins(), max_time="11 s", max_epochs=None)
    for update in (3, 8):
        die(tmp_path / "cut", plugins(), update, max_time="11 s", max_epochs=None)
        clock.now += 500  # between two attempts nothing counts
    resumed, result = live(tmp_path / "cut", plugins(), max_time="11 s", max_epochs=None)
    assert (expected.updates, result.updates) == (11, 11)
    assert_same(resumed, straight)
    _, again = live(tmp_path / "cut", plugins(), max_time="11 s", max_epochs=None)
    assert (again.updates, again.stop_reason) == (11, "duration: max_time=11 s is over")
    assert live(tmp_path / "cut", plugins(), max_time="13 s", max_epochs=None)[1].updates == 13


# -- min_epochs, min_updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "epochs"), [({}, 2), ({"min_epochs": 4}, 4), ({"min_updates": 12}, 3)])
def test_early_stop_waits_for_the_minimum(options: dict[str, Any], epochs: int) -> None:
    stop = EarlyStop(patience=1, min_delta=1e9)
    assert fit_tiny([stop], max_epochs=9, **options)[1].epochs == epochs


def test_time_waits_for_the_minimum(clock: Clock) -> None:
    assert fit_tiny([clock.plugin()], max_epochs=9, max_time=2, min_epochs=2)[1].updates == 10


def test_a_signal_does_not_wait_for_the_minimum() -> None:
    @forge.on("step_end")
    def send(step: forge.Step) -> None:
        if step.index == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit_tiny([send], max_epochs=9, min_epochs=9)


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(ForgeError, match="min_epochs is 3, and max_epochs is 2"):
        fit_tiny([], max_epochs=2, min_epochs=3)


# -- validate_first ---------------------------------------------------------------------------------------------------


def test_a_first_validation_changes_no_weight(tmp_path: Path) -> None:
    plain, _ = fit_tiny([])
    first, _ = fit_tiny([JSONL()], validate_first=True, run_dir=tmp_path)
    assert_same(first, plain)
    line = log_of(tmp_path)[0]
    expected = forge.Trainer(plugins=[], run_dir=False).validate(TinyTask(), tiny_batches(seed=1))
    assert line["update"] == 0
    assert {name: line[name] for name in expected} == expected


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_add_their_plugins_to_any_stack() -> None:
    options: dict[str, Any] = {"max_time": "1 h", "min_epochs": 2, "validate_first": True, "max_epochs": 3}
    for plugins in ([], [Duration(min_updates=7)], {"clip": {}}):
        stack = forge.Trainer(plugins=plugins, **options).stack
        assert isinstance(stack["validate_first"], ValidateFirst)
        found = stack["duration"].config
        assert (found.max_time, found.min_epochs) == ("1 h", 2)
        assert found.min_updates == (7 if isinstance(plugins, list) and plugins else None)
    assert "duration" not in forge.Trainer(max_epochs=3, plugins=[]).stack


# -- smoke ------------------------------------------------------------------------------------------------------------


def test_a_smoke_run_takes_two_batches_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task, trainer = Seen(), forge.Trainer(smoke=True, max_epochs=50, validate_every="500 updates", seed=0)
    result = trainer.fit(task, tiny_batches(), tiny_batches(seed=1))
    trainer.test(task, tiny_batches(seed=2))
    assert {stage: len(seen) for stage, seen in task.seen.items()} == {"train": 2, "val": 2, "test": 2}
    assert len(trainer.predict(task, tiny_batches())) == SMOKE
    assert (result.updates, result.run_dir) == (2, None)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("given", [{"run_dir": "runs/a"}, {"resume": "auto"}, {"resume": True}])
def test_a_smoke_run_has_nothing_to_resume(given: dict[str, Any]) -> None:
    with pytest.raises(ForgeError, match=f"there is no {next(iter(given))}"):
        forge.Trainer(smoke=True, **given)
