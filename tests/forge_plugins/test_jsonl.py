"""jsonl: one valid JSON object a line, and where the run was."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.metrics.means import PendingMeans
from forge.runs.folder import RunFolder
from forge.runs.sinks import appending
from forge_plugins import JSONL, Accumulate, Checkpoint, Tensorboard
from tests.support.profiles import some
from tests.support.tasks import Classifier, SecondRank, fit, make_batches


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Every line, read by a parser that takes no NaN."""
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=_no_json) for line in text.splitlines()]


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_every_log_is_one_line(tmp_path: Path) -> None:
    fit(train=make_batches(6), val=make_batches(1), plugins=[JSONL()], run_dir=tmp_path, log_every=2)
    lines = lines_of(tmp_path)
    assert [line["update"] for line in lines] == [2, 4, 6, 6]
    assert ["val/loss" in line for line in lines] == [False, False, False, True]


def test_a_line_begins_with_where_the_run_was(tmp_path: Path) -> None:
    fit(train=make_batches(4, size=3), max_epochs=2, plugins=[JSONL()], run_dir=tmp_path, log_every=2)
    lines = lines_of(tmp_path)
    assert list(lines[0])[:4] == ["update", "epoch", "sample", "time"]
    assert [(line["update"], line["epoch"], line["sample"]) for line in lines] == [
        (2, 0, 6),
        (4, 1, 12),
        (6, 1, 18),
        (8, 2, 24),
    ]


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    class Broken(Classifier):
        def training_step(self, batch: Any) -> Any:
            return {**super().training_step(batch), "odd": math.inf, "none": math.nan, "fine": 1.0}

    fit(Broken(), train=make_batches(1), plugins=[JSONL()], run_dir=tmp_path)
    (line,) = lines_of(tmp_path)
    assert (line["train/odd"], line["train/none"], line["train/fine"]) == (None, None, 1.0)


def test_texts_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    fit(Writes(), val=make_batches(1), max_epochs=2, plugins=[JSONL()], run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [(line["update"], line["name"], line["text"]) for line in lines] == [
        (4, "val/note", "a note"),
        (8, "val/note", "a note"),
    ]


class Writes(Classifier):
    """Logs a text after every validation."""

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        return {"note": forge.Text("a note")}


def test_a_resumed_run_drops_the_texts_of_what_it_does_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"val": make_batches(1), "run_dir": tmp_path, "validate_every": "1 updates"}
    fit(Writes(), max_updates=2, plugins=[JSONL(), Checkpoint()], **options)
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('{"update": 3, "name": "val/note", "text": "of a life that was killed"}\n{"upd')
    fit(Writes(), max_updates=4, plugins=[JSONL(), Checkpoint()], resume=True, **options)
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [(line["update"], line["text"]) for line in lines] == [(update, "a note") for update in (1, 2, 3, 4)]


def test_a_failed_run_keeps_its_lines_and_closes_its_file(tmp_path: Path) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any) -> Any:
            if self.trainer is not None and self.trainer.progress.update == 3:
                raise RuntimeError("on purpose")
            return super().training_step(batch)

    plugin = JSONL()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Fails(), train=make_batches(6), plugins=[plugin], run_dir=tmp_path, log_every=1)
    assert [line["update"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert plugin.opened is None


def test_without_a_run_folder_nothing_is_written(empty_folder: Path) -> None:
    fit(plugins=[JSONL()], run_dir=False)
    assert list(empty_folder.iterdir()) == []


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    fit(plugins=[JSONL(), SecondRank()], run_dir=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("again", [False, True])
def test_a_test_after_a_fit_belongs_to_its_last_update(again: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 2, "plugins": [JSONL()], "run_dir": tmp_path, "device": "cpu"}
    trainer, task = forge.Trainer(**settings), Classifier()
    trainer.fit(task, make_batches(3))
    if again:  # another process, or another Trainer
        trainer = forge.Trainer(**settings)
    trainer.test(task, make_batches(2))
    trainer.validate(task, make_batches(2))
    fitted, *others = lines_of(tmp_path)[-3:]
    assert [(line["update"], line["epoch"], line["sample"]) for line in others] == [(6, 2, 24)] * 2
    assert (fitted["update"], fitted["epoch"], fitted["sample"]) == (6, 2, 24)
    found = RunFolder(tmp_path)
    assert found.updates == 6
    assert found.final["test/loss"] == others[0]["test/loss"]
    assert found.final["train/loss"] == fitted["train/loss"]


def test_a_log_that_arrives_an_update_late_says_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, whose metrics are on their way while the next update runs."""
    runs = {}
    for late in (False, True):
        monkeypatch.setattr(PendingMeans, "here", not late)
        folder = tmp_path / str(late)
        train = make_batches(5)
        fit(train=train, max_epochs=2, plugins=[JSONL(), Accumulate(2)], run_dir=folder, log_every=1)
        runs[late] = [(line["update"], line["epoch"], line["sample"]) for line in lines_of(folder)]
    assert runs[True] == runs[False] == [(1, 0, 8), (2, 0, 16), (3, 1, 20), (4, 1, 28), (5, 1, 36), (6, 2, 40)]


class FullDisk:
    """A file on a disk that is full after one line."""

    def __init__(self, file: Any):
        self.file, self.lines = file, 0

    def write(self, text: str) -> None:
        self.lines += 1
        if self.lines > 1:
            raise OSError(28, "No space left on device")
        self.file.write(text)

    def close(self) -> None:
        self.file.close()
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_logged_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forge_plugins.jsonl.appending", lambda path: FullDisk(appending(path)))
    plugin = JSONL()
    assert fit(train=make_batches(6), plugins=[plugin], run_dir=tmp_path, log_every=1).updates == 6
    assert [line["update"] for line in lines_of(tmp_path)] == [1]
    assert errors_in(caplog) == [
        "jsonl: nothing more is logged there: OSError: [Errno 28] No space left on device. The run continues without "
        "it."
    ]
    monkeypatch.undo()
    fit(train=make_batches(1), plugins=[plugin], run_dir=tmp_path)
    assert [line["update"] for line in lines_of(tmp_path)] == [1, 1]


@pytest.mark.parametrize(("plugin", "name"), [(JSONL, "metrics.jsonl"), (Tensorboard, "tensorboard")])
def test_what_cannot_even_be_opened_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plugin: Any, name: str
) -> None:
    if plugin is JSONL:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("in its way")
    assert fit(train=make_batches(6), plugins=[plugin()], run_dir=tmp_path, log_every=1).updates == 6
    (error,) = errors_in(caplog)
    assert "nothing more is logged there" in error
    assert name in error


DAMAGE = {
    "a bad byte": b'{"update": 1, "train/loss": 0.\xff5}\n',
    "deep nesting": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "a note of a person": b"# looks odd from here\n",
    "no update": b'{"train/loss": 0.5}\n',
    "an update that is no number": b'{"update": "1"}\n',
    "zeros of a crash": bytes(4096) + b"\n",
    "a number without end": b'{"update": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("name", some(["metrics.jsonl", "texts.jsonl"], quick=1))
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_log_does_not_keep_a_run_from_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, name: str
) -> None:
    options: dict[str, Any] = {"val": make_batches(1), "run_dir": tmp_path, "validate_every": "1 updates"}
    fit(Writes(), max_updates=2, plugins=[JSONL(), Checkpoint()], **options)
    good = (tmp_path / name).read_bytes()
    first, rest = good.split(b"\n", 1)
    (tmp_path / name).write_bytes(first + b"\n" + DAMAGE[what] + rest)
    assert fit(Writes(), max_updates=4, plugins=[JSONL(), Checkpoint()], resume=True, **options).updates == 4
    assert (tmp_path / name).read_bytes().startswith(good)
    assert (tmp_path / f"{name}.damaged").read_bytes() == DAMAGE[what]
    said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert said == [f"jsonl: 1 damaged line of {tmp_path / name} moved to {name}.damaged; the others stay."]


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "plugins": [JSONL(), Checkpoint()]}
    fit(max_updates=2, **options)
    (tmp_path / "precious").write_text("x\n")
    for name in ("metrics.jsonl", "texts.jsonl"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    assert fit(max_updates=4, resume=True, **options).updates == 4
    assert (tmp_path / "precious").read_text() == "x\n"
    assert "It is a link" in errors_in(caplog)[0]


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
