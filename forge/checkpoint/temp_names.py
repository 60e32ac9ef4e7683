"""Temporary names beside a checkpoint, each with the process that uses it.

`.NAME.tmp-PID-TOKEN` is unfinished, or being removed; `.NAME.old-PID-TOKEN` is the former NAME while it is replaced.
Both are in the folder of NAME, so that a rename is atomic.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PATTERN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<pid>[1-9][0-9]{0,9})-(?P<token>[0-9a-f]{12})")

_under_way: set[str] = set()
"""Tokens in use by this process."""


@dataclass(frozen=True, slots=True)
class TempName:
    """A parsed temporary name."""

    path: Path
    name: str
    kind: str
    pid: int
    token: str

    @property
    def target(self) -> Path:
        return self.path.with_name(self.name)

    @property
    def twin(self) -> Path:
        """The temporary name of the successor of a replaced one."""
        return _path(self.target, "tmp", self.pid, self.token)

    @property
    def in_use(self) -> bool:
        return self.token in _under_way if self.pid == os.getpid() else _is_alive(self.pid)


@contextmanager
def temporary(target: Path) -> Iterator[tuple[Path, Path]]:
    """Reserve two names beside `target`, for its new and its former content; no sweep removes them meanwhile."""
    token = secrets.token_hex(6)
    _under_way.add(token)
    try:
        yield _path(target, "tmp", os.getpid(), token), _path(target, "old", os.getpid(), token)
    finally:
        _under_way.discard(token)


def abandoned(folder: Path) -> list[TempName]:
    """Return the temporary names that dead processes left in a folder."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    matches = [match for name in names if (match := _PATTERN.fullmatch(name))]
    found = [TempName(folder / m[0], m["name"], m["kind"], int(m["pid"]), m["token"]) for m in matches]
    return [name for name in found if not name.in_use]


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if it exists."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _path(target: Path, kind: str, pid: int, token: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{pid}-{token}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        pass
    return True
