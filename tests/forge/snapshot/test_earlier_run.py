"""A run that was saved by earlier code is continued by this one, and ends in the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support import earlier_run


def test_an_earlier_run_is_continued_bit_for_bit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(earlier_run.FOLDER / "run", run_dir, symlinks=True)
    task, result = earlier_run.fit(run_dir, resume="auto")
    assert (result.updates, result.epochs) == (12, 3)
    assert earlier_run.result_of(task, run_dir) == json.loads((earlier_run.FOLDER / "expected.json").read_text())


def test_the_same_run_from_its_start_ends_there_too(tmp_path: Path) -> None:
    task, _ = earlier_run.fit(tmp_path / "run")
    assert earlier_run.result_of(task, tmp_path / "run") == json.loads(
        (earlier_run.FOLDER / "expected.json").read_text()
    )
