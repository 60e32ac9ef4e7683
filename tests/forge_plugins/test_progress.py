"""progress: a live bar on a terminal, plain lines anywhere else, and never a trace of it in the run."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

import forge
from forge.metrics.means import PendingMeans
from forge_plugins import Accumulate, Checkpoint, Progress, Tensorboard
from forge_plugins.progress.reading import clock, short
from forge_plugins.progress.status import Status
from tests.support.tasks import Classifier, SecondRank, fit, make_batches

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    """A terminal that remembers everything."""

    def isatty(self) -> bool:
        return True

    def show(self, run: Callable[[], Any], stdout: TextIO | None = None) -> None:
        """Run with stderr, and stdout unless it goes elsewhere, on this terminal; both must come back as they were."""
        stdout = stdout or self
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(self):
            try:
                run()
            finally:
                assert sys.stdout is stdout, "the bar did not give stdout back"
                assert sys.stderr is self, "the bar did not give stderr back"

    @property
    def text(self) -> str:
        """What was written, without colours and cursor movements."""
        return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", self.getvalue())

    @property
    def pictures(self) -> list[str]:
        """Every picture of the bars, one after the other."""
        drawn = re.split(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", self.getvalue())
        return [re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text) for text in drawn]

    @property
    def last_picture(self) -> str:
        """What is on the screen at the end: what follows the last erased line."""
        return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", self.getvalue().rpartition("\x1b[2K")[2])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns."""
    for name, value in {"COLUMNS": "80", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


class Fails(Classifier):
    """Fails in its third update."""

    error: BaseException = RuntimeError("on purpose")

    def training_step(self, batch: Any) -> Any:
        if self.trainer is not None and self.trainer.progress.update == 2:
            raise self.error
        return super().training_step(batch)


class TestLines:
    def test_an_epochs_end_is_one_line_with_all_metrics(self, capsys: Any) -> None:
        fit(val=make_batches(1), max_epochs=2, plugins=[Progress()])
        first, second, _ = _lines(capsys)
        assert first.startswith("epoch 1/2  update 4/8")
        assert second.startswith("epoch 2/2  update 8/8")
        for name in ("train/loss_epoch", "train/accuracy_epoch", "val/loss", "val/accuracy", "lr"):
            assert f"  {name} " in first
        assert "train/loss " not in first

    def test_the_first_line_says_where_what_and_how(self, capsys: Any) -> None:
        class Half(forge.Plugin):
            @forge.hookimpl
            def forge_build_model(self, trainer: forge.Run) -> None:
                trainer.env.computes_in[self.name] = "half"

        task = Classifier()
        next(task.parameters()).requires_grad_(False)
        frozen = next(task.parameters()).numel()
        trained = sum(p.numel() for p in task.parameters()) - frozen
        fit(task, plugins=[Half(), Accumulate(2), Progress()])
        first = capsys.readouterr().err.splitlines()[0]
        assert first.startswith("cpu (")
        told = f"{trained} parameters trained, {frozen} frozen, float32 and half by half, 2 batches of 4 an update"
        assert first.endswith(told)

    def test_the_last_line_says_how_the_run_ended(self, capsys: Any) -> None:
        fit(plugins=[Progress()])
        assert _lines(capsys)[-1].startswith("done  epoch 1/1  update 4/4  in 0:0")

    def test_an_interval_brings_more_lines(self, capsys: Any) -> None:
        fit(train=make_batches(6), plugins=[Progress(every="2 updates")], log_every=1)
        assert _updates(capsys) == ["2/6", "4/6", "6/6"]

    def test_metrics_that_arrive_late_are_waited_for(self, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on an accelerator, where an epoch's last metrics come with the next update."""
        monkeypatch.setattr(PendingMeans, "here", False)
        fit(max_epochs=2, plugins=[Progress(every="1 h")])
        lines = _lines(capsys)
        assert len(lines) == 2
        assert lines[0].startswith("epoch 2/2  update 5/8")
        assert all("train/loss" in line for line in lines)

    def test_a_failed_run_ends_with_a_line_that_says_so(self, capsys: Any) -> None:
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(Fails(), plugins=[Progress()])
        assert _lines(capsys)[-1].startswith("failed  epoch 1/1  update 2/4")

    def test_a_file_has_no_control_codes_even_with_colours_forced(
        self, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        fit(plugins=[Progress()])
        assert "\x1b" not in capsys.readouterr().err

    @pytest.mark.parametrize(("verb", "stage"), [("validate", "val"), ("test", "test")])
    def test_an_evaluation_is_one_line_with_its_metrics(self, capsys: Any, verb: str, stage: str) -> None:
        trainer = forge.Trainer(plugins=[Progress()], device="cpu")
        getattr(trainer, verb)(Classifier(), make_batches(2))
        (line,) = _lines(capsys)
        assert line.startswith(f"{verb} done in 0:0")
        assert f"  {stage}/loss " in line

    def test_other_processes_show_nothing(self, capsys: Any) -> None:
        fit(plugins=[Progress(), SecondRank()])
        assert capsys.readouterr().err == ""


class TestBar:
    def test_the_last_picture_has_counters_and_metrics(self, terminal: Terminal) -> None:
        terminal.show(lambda: fit(val=make_batches(1), max_epochs=2, plugins=[Progress()]))
        bar = terminal.last_picture.splitlines()[0]
        assert bar.startswith(" epoch 2/2 done ━━━")
        assert "  8/8  " in bar.replace("━ 8/8", "━  8/8")
        assert re.search(r"train loss \S+ accuracy \S+  val loss \S+ accuracy", terminal.text)

    def test_there_is_a_bar_for_the_epoch_and_one_for_the_run(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("forge_plugins.progress.bar.REFRESH", 0.0)
        terminal.show(lambda: fit(train=make_batches(5, size=3), max_epochs=2, plugins=[Progress()], log_every=1))
        picture = next(text for text in terminal.pictures if "update  8/10" in text)
        epoch, update, metrics = picture.splitlines()
        assert re.match(r" epoch 2/2    ━+.*━ 3/5 ", epoch)
        assert re.match(r" update  8/10 ━+.*━ 80 % .* left", update)
        assert re.search(r"\d updates?/s|\d s/update", epoch)
        assert "samples/s" in epoch
        assert metrics.startswith(" train loss")
        assert epoch.index("3/5") == update.index("80 %")

    def test_the_end_is_a_table_with_last_and_best(self, terminal: Terminal, tmp_path: Path) -> None:
        losses = iter([3.0, 1.0, 2.0])

        class Scripted(Classifier):
            def evaluation_end(self, stage: str) -> dict[str, Any]:
                return {"error": next(losses), "score": math.nan}

        options: dict[str, Any] = {"plugins": [Progress(), Checkpoint(), Tensorboard()], "run_dir": tmp_path / "run"}
        terminal.show(lambda: fit(Scripted(), val=make_batches(1), max_epochs=3, **options))
        end = terminal.last_picture
        assert re.search(r"metric +last +best +update", end)
        assert re.search(r"val/error +2 +1 +8\n", end)
        assert re.search(r"val/score +not finite *\n", end)
        assert re.search(r"train/loss +\d\.\d+ *\n", end)
        assert "train/loss_epoch" not in end  # the last log was an epoch: the same number
        assert "trained     3 epochs, 12 updates in " in end
        assert "s, as planned (max_epochs)" in end
        assert re.search(r"speed +\S+ updates/s, \S+ samples/s", end)
        folded = end.replace("\n", "")
        assert f"run folder  {tmp_path}/run" in folded
        assert "checkpoints update-00000008, update-00000012 (latest)" in end
        assert f"tensorboard --logdir {tmp_path}/run" in folded

    def test_every_line_fits_the_terminal(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        class Talks(Classifier):
            def training_step(self, batch: Any) -> Any:
                return {**super().training_step(batch), **{f"metric_number_{i}": torch.tensor(i / 7) for i in range(9)}}

        for columns in (20, 40, 80, 120):
            monkeypatch.setenv("COLUMNS", str(columns))
            terminal.show(lambda: fit(Talks(), max_epochs=2, plugins=[Progress()]))
            pictures = [text.partition("trained ")[0] for text in terminal.pictures]  # under it are lines to be copied
            assert max(len(line) for text in pictures for line in text.splitlines()) <= columns
            terminal.truncate(terminal.seek(0))

    def test_the_cursor_comes_back(self, terminal: Terminal) -> None:
        terminal.show(lambda: fit(plugins=[Progress()]))
        assert terminal.getvalue().count(HIDE_CURSOR) == terminal.getvalue().count(SHOW_CURSOR) == 1
        assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)

    @pytest.mark.parametrize(
        ("error", "word"), [(RuntimeError("on purpose"), "failed"), (KeyboardInterrupt(), "interrupted")]
    )
    def test_an_error_ends_the_bar_cleanly(self, terminal: Terminal, error: BaseException, word: str) -> None:
        task = Fails()
        task.error = error
        with pytest.raises(type(error)):
            terminal.show(lambda: fit(task, plugins=[Progress()]))
        assert terminal.last_picture.startswith(f" epoch 1/1 {word} ━")
        assert terminal.getvalue().endswith(SHOW_CURSOR)

    def test_what_the_user_prints_stays_on_lines_of_its_own(self, terminal: Terminal) -> None:
        @forge.on("step_end")
        def say(step: forge.Step) -> None:
            print("update", step.index)
            print("to stderr", step.index, file=sys.stderr)

        terminal.show(lambda: fit(plugins=[Progress(), say]))
        lines = [line.strip() for line in terminal.text.splitlines()]
        for i in range(4):
            assert [line for line in lines if line.endswith(f"update {i}")]
            assert f"to stderr {i}" in lines

    @pytest.mark.parametrize("verb", ["validate", "test", "predict"])
    def test_the_other_verbs_have_a_bar_too(self, terminal: Terminal, verb: str) -> None:
        run = getattr(forge.Trainer(plugins=[Progress()], device="cpu"), verb)
        terminal.show(lambda: run(Classifier(), make_batches(2)))
        assert terminal.last_picture.startswith(f" {verb} done ━")

    def test_a_dumb_terminal_gets_lines(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        terminal.show(lambda: fit(plugins=[Progress()]))
        assert "\x1b" not in terminal.getvalue()
        assert terminal.text.startswith("cpu (")
        assert "\nepoch 1/1  update 4/4" in terminal.text


class TestNobodyThere:
    """A service has no stderr; a notebook or a test may close the one that there was."""

    @pytest.mark.parametrize("stderr", [None, io.StringIO()])
    def test_without_a_stderr_and_with_a_closed_one_the_run_goes_on(self, stderr: io.StringIO | None) -> None:
        if stderr is not None:
            stderr.close()
        with contextlib.redirect_stderr(stderr):
            assert fit(max_epochs=2, plugins=[Progress(every="1 updates")]).updates == 8


class TestHowThingsRead:
    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [
            ("train/loss", 0.034567, "0.0346"),
            ("train/loss", 2.5, "2.5000"),
            ("train/loss", 123.456, "123.5"),
            ("train/loss", 0.00123456, "0.001235"),
            ("train/loss", 1.23e-7, "1.23e-07"),
            ("train/loss", 0.0, "0.0000"),
            ("train/loss", float("nan"), "nan"),
            ("train/loss", float("inf"), "inf"),
            ("train/loss", -0.5, "-0.5000"),
            ("tokens_per_second", 123456.7, "123,457"),
            ("val/count", 12, "12"),
            ("lr", 0.003, "0.003"),
            ("lr/generator", 1.5e-5, "1.5e-05"),
        ],
    )
    def test_a_number_is_short(self, name: str, value: float, text: str) -> None:
        assert short(name, value) == text

    @pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (3723, "1:02:03")])
    def test_a_time_reads_like_a_clock(self, seconds: float, text: str) -> None:
        assert clock(seconds) == text


class TestSpeed:
    """On a clock that the test moves."""

    def test_the_time_left_follows_from_the_updates_after_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        status = self._after(monkeypatch, [(0.0, 0), (100.0, 1), (110.0, 11)])
        assert status.speed == pytest.approx(1.0)
        assert status.remaining == pytest.approx(89.0)

    def test_time_spent_in_evaluation_makes_updates_no_slower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        status = self._after(monkeypatch, [(0.0, 1), (10.0, 11)], paused=5.0)
        assert status.speed == pytest.approx(2.0)

    def _after(self, monkeypatch: pytest.MonkeyPatch, moves: list[tuple[float, int]], paused: float = 0.0) -> Status:
        now = [0.0]
        monkeypatch.setattr("forge_plugins.progress.status.time.monotonic", lambda: now[0])
        trainer, status = forge.Trainer(max_epochs=1, plugins=[]), Status("fit", planned=100)
        for now[0], trainer.progress.update in moves:
            status.paused = paused
            status.move(trainer)
        return status


def _lines(capsys: Any) -> list[str]:
    """Every line but the first of a fit."""
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("cpu (")]


def _updates(capsys: Any) -> list[str]:
    """The counters of every line but the final one."""
    return [re.findall(r"update +(\S+)", line)[0] for line in _lines(capsys)[:-1]]
