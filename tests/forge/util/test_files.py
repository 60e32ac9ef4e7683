"""Files that are replaced in one go: after an error the old one is there, and nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.runs.sinks import drop_after
from forge.util.files import atomic_write
from forge_plugins.tensorboard import projector


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with atomic_write(file) as beside:
        beside.write_text("new")
        assert file.read_text() == "old"
    assert (file.read_text(), names(tmp_path)) == ("new", ["file"])


def test_an_error_of_the_disk_names_a_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '.*file'"), atomic_write(tmp_path / "file"):
        raise OSError(28, "No space left on device")


def metrics_lines(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"update": 1}\n{"update": 2}\n')
    drop_after(folder / "metrics.jsonl", 1, "a logger")


def points(folder: Path) -> None:
    projector.write(folder, "points", forge.Embedding(torch.zeros(2, 3)))


@pytest.mark.parametrize(("write", "left"), [(metrics_lines, ["metrics.jsonl"]), (points, [])])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_no_file_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], None],
    left: list[str],
    error: BaseException,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write(tmp_path)
    assert names(tmp_path) == left
