"""Who can read a run folder: its owner, or its group if asked; folders that exist are not changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.runs.lock import RunLock
from forge.testing.tiny import TinyTask, tiny_batches
from forge.util import files
from forge_plugins import JSONL, Checkpoint


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fit(run_dir: Path | None, **options: Any) -> Path:
    trainer = forge.Trainer(
        plugins=[Checkpoint(), JSONL()], run_dir=run_dir, max_epochs=1, seed=0, device="cpu", **options
    )
    made = trainer.fit(TinyTask(), tiny_batches()).run_dir
    assert made is not None
    return made


def test_a_new_run_folder_is_private(empty_folder: Path, tmp_path: Path) -> None:
    assert mode(fit(None)) == 0o700
    assert mode(empty_folder / "runs") == mode(empty_folder / "runs" / "tiny_task") == 0o755
    assert mode(fit(tmp_path / "mine" / "first")) == 0o700
    assert mode(tmp_path / "mine") == 0o755


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    assert mode(fit(tmp_path / "run")) == 0o755
    assert mode(tmp_path / "run" / "checkpoints" / "update-00000005") == 0o700


def test_a_run_for_a_group_can_be_read_and_continued_by_it(tmp_path: Path) -> None:
    run = fit(tmp_path / "ours", group_access=True)
    assert mode(run) & 0o777 == 0o770
    for folder in (run / "checkpoints", run / "checkpoints" / "update-00000005"):
        assert mode(folder) & 0o777 == 0o770
    for file in (run / ".lock", *(run / "checkpoints" / "update-00000005").iterdir()):
        assert mode(file) & 0o777 == 0o660
    assert mode(fit(tmp_path / "mine")) == 0o700
    assert mode(tmp_path / "mine" / "checkpoints" / "update-00000005" / "state.json") == 0o600


def test_every_new_folder_is_flushed_into_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    with RunLock(tmp_path / "runs" / "group" / "run"):
        assert synced == [tmp_path, tmp_path / "runs", tmp_path / "runs" / "group"]
    with RunLock(tmp_path / "runs" / "group" / "run"):
        assert len(synced) == 3
