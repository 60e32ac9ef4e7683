"""goodput: the parts of a run's wall time, over attempts, with a clock that the test holds."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.cli import main
from forge.runs.folder import RunFolder
from forge.spans import goodput
from forge.testing import TinyTask, check_plugin, tiny_batches
from forge_plugins import Checkpoint, Spans, spans
from tests.support import forked
from tests.support.patience import PATIENCE
from tests.support.spans_kit import Clock


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Clock:
    watch = Clock()
    monkeypatch.setattr(goodput, "clock", watch)
    monkeypatch.setattr("time.perf_counter", watch)  # by which the Trainer measures the wait for data
    return watch


class Paced(TinyTask):
    """Every update takes a second of the test's clock, a validation three, and others what `more` says."""

    def __init__(self, watch: Clock, more: dict[int, float] | None = None, dies_at: int | None = None):
        super().__init__()
        self.watch, self.more, self.dies_at = watch, more or {}, dies_at

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        update = self.trainer.progress.update
        if update == self.dies_at:
            self.dies_at = None
            raise KeyboardInterrupt
        self.watch.now += 1.0 + self.more.get(update, 0.0)
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.watch.now += 3.0
        return super().validation_step(batch) if hasattr(super(), "validation_step") else {}


class Slow(forge.Plugin):
    """A start of 20 seconds, and checkpoints of 5."""

    def __init__(self, watch: Clock):
        super().__init__()
        self.watch = watch

    @forge.hookimpl
    def forge_start(self) -> None:
        self.watch.now += 20

    @forge.hookimpl
    def forge_save(self) -> None:
        self.watch.now += 5


class SlowBatches:
    """Batches that take half a second each."""

    def __init__(self, watch: Clock, batches: list[Any]):
        self.watch, self.batches = watch, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.watch.now += 0.5
            yield batch


def fit(task: Paced, folder: Path, updates: int, **more: Any) -> goodput.TimeSpent:
    plugins = [Spans(), Slow(task.watch), Checkpoint(every="4 updates", keep="all")]
    batches = SlowBatches(task.watch, tiny_batches())
    trainer = forge.Trainer(
        plugins=plugins, max_updates=updates, run_dir=folder, seed=0, allow_inexact=True, validate_every=None, **more
    )
    began = task.watch.now
    with suppress(KeyboardInterrupt):
        trainer.fit(task, batches)
    found = goodput.spent(RunFolder(folder).spans)
    assert found is not None
    newest = goodput.attempts_in(RunFolder(folder).spans)[-1]
    assert sum(newest.parts.values()) == pytest.approx(task.watch.now - began)  # the law, of one attempt
    return found


def test_every_second_is_in_one_part(watch: Clock, tmp_path: Path) -> None:
    spent = fit(Paced(watch), tmp_path, 10)
    expected = {"update": 9.0, "start": 21.5, "data": 4.5, "checkpoint": 15.0}  # at 4, at 8 and at the end
    assert {name: seconds for name, seconds in spent.parts.items() if seconds} == pytest.approx(expected)
    assert spent.share == pytest.approx(9 / 50)


def test_what_was_compiled_before_the_run_is_not_in_it(
    watch: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [SimpleNamespace(duration_us=2e5)]
    monkeypatch.setattr(spans, "compiled_frames", lambda: frames)
    assert fit(Paced(watch), tmp_path, 4).parts["compile"] == 0


def test_updates_that_are_done_twice_are_lost(watch: Clock, tmp_path: Path) -> None:
    """The attempt dies after 10 updates, the next one goes on from the checkpoint at 8."""
    first = fit(Paced(watch, dies_at=10), tmp_path, 12)
    assert first.parts["update"] == pytest.approx(9)
    assert first.parts["lost"] == 0
    spent = fit(Paced(watch), tmp_path, 12, resume="auto")
    assert spent.attempts == 2
    assert spent.parts["update"] == pytest.approx(10)  # each of them once, but for the first of each attempt
    # 9 and 10, the data of 9, 10 and 11, which died
    assert spent.parts["lost"] == pytest.approx(2 * 1.0 + 3 * 0.5)
    assert spent.parts["start"] == pytest.approx(2 * (20 + 1.0 + 0.5) + 3 * 0.5)  # the second one passes over three
    assert spent.seconds == pytest.approx(
        sum(sum(a.parts.values()) for a in goodput.attempts_in(RunFolder(tmp_path).spans))
    )


def test_an_attempt_without_a_checkpoint_is_lost_but_for_its_start(watch: Clock, tmp_path: Path) -> None:
    fit(Paced(watch, dies_at=3), tmp_path, 8)
    spent = fit(Paced(watch), tmp_path, 8, resume="auto")
    assert spent.parts["update"] == pytest.approx(7)
    assert spent.parts["lost"] == pytest.approx(2 * 1.0 + 3 * 0.5)


def test_a_stall_is_what_an_update_takes_beyond_the_usual(watch: Clock, tmp_path: Path) -> None:
    spent = fit(Paced(watch, more={5: 100.0}), tmp_path, 8)
    assert spent.parts["stall"] == pytest.approx(100)
    assert spent.parts["update"] == pytest.approx(7)


def test_a_rewind_loses_what_it_goes_back_over(watch: Clock, tmp_path: Path) -> None:
    class Back(forge.Plugin):
        done = False

        @forge.hookimpl
        def forge_boundary(self, trainer: forge.Run) -> None:
            if trainer.progress.update == 6 and not self.done:
                self.done = True
                trainer.request_rewind("a test", by=self.name)

    task = Paced(watch)
    trainer = forge.Trainer(
        plugins=[Spans(), Back(), Checkpoint(every="4 updates")],
        max_updates=8,
        run_dir=tmp_path,
        seed=0,
        validate_every=None,
    )
    trainer.fit(task, tiny_batches())
    spent = goodput.spent(RunFolder(tmp_path).spans)
    assert spent is not None
    assert spent.parts["update"] == pytest.approx(7)
    assert spent.parts["lost"] == pytest.approx(2)
    assert spent.seconds == pytest.approx(watch.now - 100)


def test_validations_are_counted(watch: Clock, tmp_path: Path) -> None:
    task = Paced(watch)
    trainer = forge.Trainer(plugins=[Spans()], max_updates=4, run_dir=tmp_path, seed=0, validate_every="2 updates")
    trainer.fit(task, tiny_batches(), tiny_batches()[:2])
    spent = goodput.spent(RunFolder(tmp_path).spans)
    assert spent is not None
    assert spent.parts["evaluate"] == pytest.approx(2 * 2 * 3.0)
    assert spent.parts["update"] == pytest.approx(3)


KILLED = """
import os, signal, sys
import forge
from forge.checkpoint import wait_until_written
from forge.runs.folder import RunFolder
from forge.spans import goodput
from forge.testing import TinyTask, tiny_batches
from forge_plugins import Checkpoint, Spans

class Dies(TinyTask):
    def training_step(self, batch):
        if self.trainer.progress.update == 10 and not self.trainer.resumed_from:
            wait_until_written()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)

plugins = [Spans(), Checkpoint(every="4 updates")]
trainer = forge.Trainer(plugins=plugins, max_updates=12, run_dir="run", resume="auto", seed=0, validate_every=None)
trainer.fit(Dies(), tiny_batches())
"""


def test_the_parts_of_a_killed_and_resumed_run_add_up(tmp_path: Path) -> None:
    assert forked.run([sys.executable, "-c", KILLED], cwd=tmp_path, timeout=PATIENCE).returncode == -signal.SIGKILL
    assert forked.run([sys.executable, "-c", KILLED], cwd=tmp_path, timeout=PATIENCE).returncode == 0
    attempts, spent = (
        goodput.attempts_in(RunFolder(tmp_path / "run").spans),
        goodput.spent(RunFolder(tmp_path / "run").spans),
    )
    assert spent is not None
    assert [attempt.update for attempt in attempts] == [0, 8]
    assert spent.seconds == pytest.approx(sum(sum(attempt.parts.values()) for attempt in attempts))
    assert spent.between > 0
    card = (tmp_path / "run" / "card.md").read_text()
    assert "## Where the time went" in card
    assert "over 2 attempts" in card


parts = st.fixed_dictionaries({name: st.floats(0, 1e6) for name in goodput.PARTS})


@st.composite
def histories(draw: st.DrawFn) -> list[goodput.TimedAttempt]:
    """Attempts whose marks grow, each from any update."""
    attempts = []
    for _ in range(draw(st.integers(1, 5))):
        grown, at, marks = dict.fromkeys(goodput.PARTS, 0.0), draw(st.integers(0, 20)), []
        first = at
        for step in draw(st.lists(parts, min_size=1, max_size=4)):
            grown = {name: grown[name] + step[name] for name in grown}
            marks.append((at, dict(grown)))
            at += draw(st.integers(1, 5))
        end = {name: grown[name] + draw(parts)[name] for name in grown}
        attempts.append(goodput.TimedAttempt(0.0, first, end, marks))
    return attempts


@given(histories())
def test_whatever_is_lost_the_parts_add_up_to_the_wall_time(
    history: list[goodput.TimedAttempt],
) -> None:
    spent = goodput.account(history)
    wall = sum(sum(attempt.parts.values()) for attempt in history)
    assert (spent.seconds if spent else 0.0) == pytest.approx(wall)
    assert spent is None or all(seconds >= 0 for seconds in spent.parts.values())


@pytest.mark.parametrize("text", ["", "{}", '{"attempts": 3}', '{"attempts": [{"parts": {"update": "x"}}, null]}', "["])
def test_a_torn_or_strange_file_is_no_account(text: str, tmp_path: Path) -> None:
    (tmp_path / goodput.FILE).write_text(text)
    assert goodput.spent(RunFolder(tmp_path).spans) is None


def test_the_list_and_the_report_show_the_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    full = dict.fromkeys(goodput.PARTS, 0.0)
    record = {"began": 0, "update": 0, "parts": {**full, "update": 90.0, "data": 10.0}, "marks": []}
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "card.json").write_text(json.dumps({"started": "2026-01-01 00:00:00 +0000", "task": {"class": "T"}}))
    (run / goodput.FILE).write_text(json.dumps({"attempts": [record]}))
    assert main(["runs", "runs"]) == 0
    assert "90%" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["goodput"]["share"] == 0.9
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "waiting for data" in page
    assert "90%" in page


@pytest.mark.parametrize("options", [{}, {"hooks": True, "rates": True, "file": True}])
def test_it_is_a_pure_observer(options: dict[str, bool]) -> None:
    check_plugin(lambda: Spans(**options))
