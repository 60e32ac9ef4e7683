"""The files of a checkpoint, for `forge ckpt verify`: which are damaged, and how."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.checkpoint import StoredCheckpoint, manifest
from forge.errors import CheckpointError


def file_states(path: Path) -> list[tuple[str, int | None, str]]:
    """Return (name, size, problem or "") of every file of a checkpoint."""
    problem = ""
    try:
        StoredCheckpoint(path).verify()
    except CheckpointError as error:
        problem = str(error).replace(f"{path}/", "").replace(f"{path} ", "")
    records = _records(path / manifest.NAME)
    names = _names(path) if records is None else list(records)
    sizes = [_length(path / name) for name in (manifest.NAME, *names)]
    if not problem:
        problems = [""] * len(sizes)
    elif records is None:
        problems = [_irregular(path / manifest.NAME) or problem, *["unknown without its manifest"] * len(names)]
    else:
        problems = ["", *(_file_problem(path / name, records[name]) for name in names)]
        if not any(problems):
            problems[1] = problem  # each file is as written, but together they are no checkpoint
    return list(zip((manifest.NAME, *names), sizes, problems, strict=True))


def _names(path: Path) -> list[str]:
    """Return the files of a checkpoint that has no usable manifest."""
    there = sorted(file.name for file in path.glob("*-of-*.safetensors"))
    return [manifest.DOCUMENT, *there] if there else list(manifest.FILES)


def _records(file: Path) -> Mapping[str, Any] | None:
    """Read the manifest's records of the other files; None if it cannot be trusted."""
    if _irregular(file):
        return None
    try:
        with file.open("rb") as stream:
            return manifest.decode(stream.read(manifest.MAX_SIZE + 1), file.name)
    except (OSError, CheckpointError):
        return None


def _file_problem(file: Path, record: Any) -> str:
    problem = _irregular(file)
    if problem:
        return problem
    length = _length(file)
    if length != record.size:
        return f"{length:,} bytes instead of {record.size:,}"
    with file.open("rb") as stream:
        same = hashlib.file_digest(stream, "sha256").hexdigest() == record.sha256
    return "" if same else "not the bytes that were written"


def _irregular(file: Path) -> str:
    """Return why a file must not be opened: a link leads elsewhere, and a pipe never ends."""
    if not os.path.lexists(file):
        return "missing"
    return "" if stat.S_ISREG(file.lstat().st_mode) else "not a regular file"


def _length(file: Path) -> int | None:
    return file.lstat().st_size if os.path.lexists(file) else None
