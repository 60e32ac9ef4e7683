"""A run folder that a stranger made: links are not followed, pipes and devices not waited for, sizes bounded."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.cli import main
from forge.report import images
from forge.runs import folder as folders
from forge.runs.folder import RunFolder, find_runs
from forge.util.files import read_regular
from tests.support.patience import PATIENCE
from tests.support.profiles import some
from tests.support.tasks import fit

READ = ["card.json", "end.json", "lives.json", "spans.json", "metrics.jsonl", "texts.jsonl", "config.yaml", ".lock"]
SECRET = "s3cret-of-the-reader"


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a card and metrics, as it came by mail."""
    folder = tmp_path / "theirs" / "run"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "card.json").write_text(json.dumps({"recipe": "theirs", "task": {"class": "Net"}}))
    (folder / "metrics.jsonl").write_text('{"update": 1, "train/loss": 0.5}\n')
    (tmp_path / "precious").write_text(
        json.dumps({"update": 1, "name": SECRET, "text": SECRET, SECRET: 1, "recipe": SECRET})
    )
    return folder


def plant(file: Path, kind: str, precious: Path) -> None:
    file.unlink(missing_ok=True)
    match kind:
        case "a pipe":
            os.mkfifo(file)
        case "a device":
            file.symlink_to("/dev/zero")
        case "a link":
            file.symlink_to(precious)


@pytest.mark.parametrize("kind", some(["a link", "a pipe", "a device"], quick=1))
def test_a_planted_file_is_not_read(run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [*READ, "tensorboard/events.out.tfevents.1"]:
        planted = shutil.copytree(run, run.with_name(f"run-{name.replace('/', '-')}"))
        plant(planted / name, kind, tmp_path / "precious")
        assert main(["runs", "compare", str(run), str(planted)]) == 0
        assert main(["report", str(planted)]) == 0
        assert SECRET not in (planted / "report.html").read_text()
    assert main(["runs", str(run.parent)]) == 0
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a device"])
def test_a_planted_report_is_replaced(run: Path, tmp_path: Path, kind: str) -> None:
    before = (tmp_path / "precious").read_text()
    plant(run / "report.html", kind, tmp_path / "precious")
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "precious").read_text() == before
    assert not (run / "report.html").is_symlink()
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_the_best_checkpoint_is_one_of_this_run(run: Path, tmp_path: Path) -> None:
    state = {"plugins": {"checkpoint": {"monitor": "val/loss", "mode": "min", "best": [{"update": 2, "value": 0.5}]}}}
    for folder in (tmp_path / "elsewhere", run / "checkpoints" / "update-00000002"):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(state))
    best = run / "checkpoints" / "best"
    best.symlink_to("update-00000002")
    assert RunFolder(run).best is not None
    for target in (tmp_path / "elsewhere", "../../../elsewhere", "update-00000003"):
        best.unlink()
        best.symlink_to(target)
        assert RunFolder(run).best is None


def test_links_to_folders_are_followed_one_level(run: Path, tmp_path: Path) -> None:
    """A group of runs, or a run, may be on another disk; a link to / is not searched."""
    mine = tmp_path / "runs"
    mine.mkdir()
    (mine / "group").symlink_to(run.parent)
    (mine / "one").symlink_to(run)
    (mine / "deep").symlink_to(tmp_path)
    (mine / "all").symlink_to("/")
    (mine / "self").symlink_to(mine)
    assert sorted(find_runs(mine)) == [mine / "group" / "run", mine / "one"]


def test_a_log_without_end_is_read_up_to_a_bound(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_LOG_BYTES", 1000)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"update": {i}, "train/loss": 1.0}}\n' for i in range(100))
        file.truncate(2**40)  # a hole of a terabyte
    assert 10 < len(RunFolder(run).records) < 40


def test_pictures_without_end_are_read_up_to_a_bound(run: Path) -> None:
    with (run / "tensorboard" / "events.out.tfevents.1").open("wb") as file:
        file.truncate(2**40)
    assert images.pictures(run / "tensorboard") == []


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_regular(tmp_path / "file", 10)
    assert read_regular(tmp_path / "file", 11) == bytes(11)


@pytest.mark.parametrize("name", ["config.yaml", "card.json", "card.md", "end.json"])
def test_a_run_replaces_a_link_that_it_finds(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    fit(recipe="default", plugins={"tensorboard": None}, run_dir=tmp_path / "run", max_epochs=1)
    assert (tmp_path / "precious").read_text() == "x"
    assert not (tmp_path / "run" / name).is_symlink()
