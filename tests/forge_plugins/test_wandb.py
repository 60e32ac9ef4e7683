"""wandb: what the real package writes offline, read back record by record."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forge.errors import StackError
from forge_plugins import Checkpoint, Wandb
from tests.support.logger_runs import LAST, bytes_below, live, live_twice
from tests.support.patience import until
from tests.support.tasks import fit, make_batches

pytestmark = pytest.mark.slow  # each run starts a process of its own
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network, and nothing outside the test's folder."""
    pytest.importorskip("wandb")
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


def blocks(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a header of seven bytes."""
    content, at, held = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + length > len(content):  # being written
            return
        held, at = held + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield held
            held = b""


def records(folder: Path) -> list[Any]:
    """Every record of the only offline run of a run folder; wandb's own process writes the last after `finish`."""
    from wandb.proto import wandb_internal_pb2

    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    record: Any = wandb_internal_pb2

    def read() -> list[Any]:
        return [record.Record.FromString(block) for block in blocks(file)]

    until(lambda: any(entry.HasField("exit") for entry in read()), "wandb does not finish its file")
    return read()


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of the run as wandb would upload them."""
    rows: list[dict[str, Any]] = []
    for record in records(folder):
        if record.HasField("history"):
            rows.append({})
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                inner = rows[-1]
                for key in outer:
                    inner = inner.setdefault(key, {})
                inner[last] = json.loads(item.value_json)
    return rows


def series(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(row["_step"], row[name]) for row in history(folder) if name in row]


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    """The same from the journal."""
    lines = [json.loads(line) for line in (folder / "wandb" / "journal.jsonl").read_text().splitlines()]
    return [(line["update"], line["scalars"][name]) for line in lines if name in line.get("scalars", {})]


def test_a_run_has_its_metrics_config_and_pictures(tmp_path: Path) -> None:
    live(partial(Wandb, tags=["a"], project="mine"), tmp_path / "run", updates=20)
    losses = series(tmp_path / "run", "train/loss")
    assert [update for update, _ in losses] == list(range(1, 21))
    assert [update for update, _ in series(tmp_path / "run", "val/loss")] == [10, 20]
    run = next(record.run for record in records(tmp_path / "run") if record.HasField("run"))
    assert (run.project, run.display_name, list(run.tags)) == ("mine", "run", ["a"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["task.lr"] == 0.1
    assert config["trainer.seed"] == 0
    row = next(row for row in history(tmp_path / "run") if row["_step"] == 10)
    assert (row["val/picture"]["_type"], row["val/picture"]["caption"]) == ("image-file", "half")
    assert row["val/weights"]["values"] == [3, 2, 2, 3]
    (note,) = {path.read_text() for path in (tmp_path / "run" / "wandb").rglob("*.html")}
    assert "<strong>bold</strong>" in note


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_was_cut_short_has_each_update_once(tmp_path: Path, killed: bool) -> None:
    live(Wandb, tmp_path / "straight")
    live_twice(Wandb, tmp_path / "cut", killed)
    rows = [{k: v for k, v in row.items() if k.startswith(("train", "_step"))} for row in history(tmp_path / "cut")]
    assert [row["_step"] for row in rows] == list(range(1, LAST + 1))
    for name in ("train/loss", "val/loss", "val/accuracy"):
        assert series(tmp_path / "cut", name) == series(tmp_path / "straight", name)
    assert [step for step, _ in series(tmp_path / "cut", "val/picture")] == [10, 20, 30, 40]


def test_checkpoints_are_an_artifact_only_on_request(tmp_path: Path) -> None:
    best = Checkpoint("2 updates", best={"monitor": "val/loss", "mode": "min"})
    for asked in (False, True):
        folder = tmp_path / str(asked)
        plugins = [best, Wandb(checkpoints=asked)]
        fit(val=make_batches(1), max_updates=4, plugins=plugins, run_dir=folder, validate_every="2 updates", seed=0)
        found = [record.request.log_artifact.artifact for record in records(folder) if record.HasField("request")]
        found += [record.artifact for record in records(folder) if record.HasField("artifact")]
        aliases = sorted(alias for artifact in found for alias in artifact.aliases)
        assert aliases == (["best", "latest"] if asked else [])
        if asked:
            names = {entry.path for artifact in found for entry in artifact.manifest.contents}
            assert "manifest.json" in names


def test_no_key_enters_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    fit(plugins=[Wandb(), Checkpoint()], run_dir=tmp_path / "run", seed=0)
    written = bytes_below(tmp_path / "run")
    assert b"train/loss" in written
    assert KEY.encode() not in written


def test_a_run_online_without_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StackError, match="wandb login"):
        fit(plugins=[Wandb(mode="online")], run_dir=tmp_path / "run")


def test_a_failure_is_logged_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(**options: Any) -> None:
        raise RuntimeError("no way to https://me:secret@host/api")

    monkeypatch.setattr("wandb.init", fails)
    assert fit(train=make_batches(6), plugins=[Wandb()], run_dir=tmp_path, log_every=1).updates == 6
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.startswith("wandb: nothing more is logged there: RuntimeError: no way to https://***@host/api.")


class Online:
    """Plays wandb's server: a run that has points up to some update already, and takes no earlier ones."""

    def __init__(self, has: int):
        self.starting_step, self.rows, self.id, self.dir = has, [], "x", "elsewhere/files"

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values["train/loss"])) if "train/loss" in values else None

    def finish(self, exit_code: int = 0) -> None:
        pass


@pytest.mark.parametrize("has", [0, 3, 5, 7])
def test_online_what_the_server_lacks_is_sent_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: int
) -> None:
    """Update 4 is the checkpoint; the server heard of updates below `has` before the kill."""
    monkeypatch.setattr("forge_plugins.wandb.log_in", lambda: None)
    run = Online(0)
    monkeypatch.setattr("wandb.init", lambda **options: run)
    options: dict[str, Any] = {"run_dir": tmp_path, "log_every": 1, "seed": 0, "train": make_batches(8)}
    fit(plugins=[Wandb(mode="online"), Checkpoint("4 updates")], max_updates=4, **options)
    whole = run.rows
    run = Online(has)
    fit(plugins=[Wandb(mode="online"), Checkpoint("4 updates")], max_updates=8, resume=True, **options)
    assert [step for step, _ in run.rows] == list(range(max(has, 1), 9))
    assert [row for row in run.rows if row[0] <= 4] == [row for row in whole if row[0] >= has]
