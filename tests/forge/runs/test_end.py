"""end.json: how a fit ended, for whoever looks later, whatever plugins it had."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.runs.folder import RunFolder
from forge_plugins import JSONL, Checkpoint, Clip
from tests.support.tasks import Classifier, SecondRank, fit, make_batches, noting

TRAINED = {"train/loss", "train/accuracy"}
LOGGED = {*TRAINED, *(f"{name}_epoch" for name in TRAINED), "val/loss", "val/accuracy", "lr"}


class Raises(Classifier):
    """Ends in its second update."""

    error: BaseException = RuntimeError("on purpose")

    def training_step(self, batch: Any) -> Any:
        if self.trainer is not None and self.trainer.progress.update == 1:
            raise self.error
        return super().training_step(batch)


class Shot(Classifier):
    """Sends SIGTERM to its own process in its second update."""

    def training_step(self, batch: Any) -> Any:
        if self.trainer is not None and self.trainer.progress.update == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch)


def end_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "end.json").read_text())


def status_of(folder: Path) -> tuple[str, str]:
    return end_of(folder)["status"], end_of(folder)["reason"]


def test_a_fit_without_plugins_ends_with_its_last_metrics(tmp_path: Path) -> None:
    result = fit(val=make_batches(1), max_epochs=2, plugins=[], run_dir=tmp_path)
    end = end_of(tmp_path)
    assert (end["status"], end["reason"]) == ("finished", "max_epochs")
    assert (end["updates"], end["epochs"], end["metrics"]) == (8, 2, result.metrics)
    assert end["seconds"] > 0
    assert RunFolder(tmp_path).final == result.metrics


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("on purpose"), ("failed", "RuntimeError: on purpose")),
        (KeyboardInterrupt(), ("interrupted", "KeyboardInterrupt")),
    ],
)
def test_an_error_is_named_and_an_interrupt_is_no_failure(
    tmp_path: Path, error: BaseException, told: tuple[str, str]
) -> None:
    task = Raises()
    task.error = error
    with pytest.raises(type(error)):
        fit(task, plugins=[], run_dir=tmp_path)
    assert status_of(tmp_path) == told


def test_an_error_at_the_end_is_named_too(tmp_path: Path) -> None:
    class EndsBadly(forge.Plugin):
        @forge.hookimpl
        def forge_end(self) -> None:
            raise RuntimeError("at the end")

    with pytest.raises(RuntimeError):
        fit(plugins=[EndsBadly(), JSONL()], run_dir=tmp_path)
    assert status_of(tmp_path) == ("failed", "RuntimeError: at the end")


@pytest.mark.parametrize("plugins", [[], [Checkpoint()]])
def test_a_signal_is_no_failure_saved_or_not(tmp_path: Path, plugins: list[Any]) -> None:
    with pytest.raises(SystemExit):
        fit(Shot(), plugins=plugins, run_dir=tmp_path)
    status, reason = status_of(tmp_path)
    assert (status, end_of(tmp_path)["updates"]) == ("interrupted", 2)
    assert reason.startswith(
        "SIGTERM: the state after update 2 is saved" if plugins else "signal 15: the state was not"
    )


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    class Odd(Classifier):
        def evaluation_end(self, stage: str) -> dict[str, Any]:
            return {"odd": math.nan}

    fit(Odd(), val=make_batches(1), plugins=[], run_dir=tmp_path)
    assert end_of(tmp_path)["metrics"]["val/odd"] is None


def test_a_run_that_goes_on_has_no_end_meanwhile(tmp_path: Path) -> None:

    look, there = noting("boundary", lambda trainer: (tmp_path / "end.json").exists())
    options: dict[str, Any] = {"plugins": [Checkpoint(), look], "run_dir": tmp_path}
    fit(max_epochs=1, **options)
    fit(max_epochs=2, resume=True, **options)
    assert there == [False] * 8
    assert end_of(tmp_path)["updates"] == 8


def test_a_fit_that_is_refused_leaves_the_end_alone(tmp_path: Path) -> None:
    fit(plugins=[Checkpoint()], run_dir=tmp_path)
    before = [(tmp_path / name).read_text() for name in ("end.json", "card.json")]
    with pytest.raises(forge.CheckpointError):
        fit(plugins=[Checkpoint()], run_dir=tmp_path)
    with pytest.raises(forge.ForgeError):
        fit(train=make_batches(7), plugins=[Checkpoint()], run_dir=tmp_path, resume=True, max_epochs=2)
    assert [(tmp_path / name).read_text() for name in ("end.json", "card.json")] == before


def test_evaluations_and_other_ranks_leave_none(tmp_path: Path) -> None:
    forge.Trainer(plugins=[], run_dir=tmp_path, device="cpu").test(Classifier(), make_batches(1))
    fit(plugins=[SecondRank()], run_dir=tmp_path)
    assert not (tmp_path / "end.json").exists()


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), ValueError("no JSON")])
def test_an_end_that_cannot_be_written_costs_nothing_but_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise problem

    monkeypatch.setattr("forge.engine.session.write_end", fail)
    assert fit(plugins=[], run_dir=tmp_path).updates == 4
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Raises(), plugins=[], run_dir=tmp_path)
    assert caplog.text.count(f"end.json cannot be written: {problem}") == 2


# ---------------------------------------------------------------------------------------------------------------------
# A run that was continued


def twice(folder: Path, first: list[Any], second: list[Any], **options: Any) -> forge.FitResult:
    """Two lives of one run, of an epoch each."""
    fit(max_epochs=1, plugins=[Checkpoint(), *first], run_dir=folder, seed=1, val=make_batches(1))
    plugins, settings = [Checkpoint(), *second], {"max_epochs": 2, "val": make_batches(1), **options}
    return fit(plugins=plugins, run_dir=folder, seed=1, resume=True, **settings)


def test_a_last_life_without_jsonl_is_told_as_it_was(tmp_path: Path) -> None:
    result = twice(tmp_path, [JSONL()], [])
    run = RunFolder(tmp_path)
    assert (run.status, run.updates, run.epochs) == ("finished", 8, 2)
    assert run.final == result.metrics
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    assert run.seconds == pytest.approx(first + end_of(tmp_path)["seconds"])


def test_the_end_of_an_earlier_life_is_not_believed(tmp_path: Path) -> None:
    fit(max_epochs=1, plugins=[Checkpoint()], run_dir=tmp_path)
    stale = {**end_of(tmp_path), "started": "2020-01-01 12:00:00 +0000"}
    (tmp_path / "end.json").write_text(json.dumps(stale))
    (tmp_path / "weights.safetensors").unlink()
    assert (RunFolder(tmp_path).status, RunFolder(tmp_path).final) == ("killed", {})


@pytest.mark.parametrize("plugins", [[JSONL()], []])
def test_metrics_nobody_logs_any_more_are_no_results(tmp_path: Path, plugins: list[Any]) -> None:
    result = twice(tmp_path, [JSONL(), Clip(0.5)], plugins)
    assert "grad_norm/before" in result.metrics  # a resume is exact: what was restored is not forgotten
    assert set(RunFolder(tmp_path).final) == LOGGED


def test_a_killed_life_and_a_test_after_the_end_are_alike(tmp_path: Path) -> None:
    twice(tmp_path, [JSONL(), Clip(0.5)], [JSONL()])
    trainer = forge.Trainer(plugins=[JSONL()], run_dir=tmp_path, device="cpu")
    tested = trainer.test(Classifier(), make_batches(1))
    end = (tmp_path / "end.json").stat()
    os.utime(tmp_path / "metrics.jsonl", ns=(end.st_atime_ns, end.st_mtime_ns))  # clocks of files are coarse
    final = RunFolder(tmp_path).final
    assert final["test/loss"] == tested["test/loss"]
    assert "grad_norm/before" not in final
    assert "grad_norm/before" in RunFolder(tmp_path).series
    (tmp_path / "end.json").unlink()
    assert RunFolder(tmp_path).final.keys() == final.keys()


def test_a_rewind_keeps_what_this_life_has_logged(tmp_path: Path) -> None:
    @forge.on("step_end", mutates=True)
    def back(step: forge.Step) -> None:
        if step.index == 7 and step.trainer.restores < 2:
            step.trainer.request_rewind("a test")

    back.observer = True
    twice(tmp_path, [JSONL(), Clip(0.5)], [JSONL(), back], validate_every=None)
    assert set(end_of(tmp_path)["metrics"]) == LOGGED


def test_an_earlier_lifes_validation_counts_until_another(tmp_path: Path) -> None:
    result = twice(tmp_path, [], [], validate_every=None)
    assert end_of(tmp_path)["metrics"] == result.metrics
    assert "val/loss" in result.metrics


def test_a_life_that_had_nothing_to_do_keeps_the_result(tmp_path: Path) -> None:
    result = twice(tmp_path, [Clip(0.5)], [Clip(0.5)], max_epochs=1)
    assert end_of(tmp_path)["metrics"] == result.metrics
    assert "grad_norm/before" in result.metrics
