"""Files that change in one go: whoever reads meanwhile reads the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to, which then takes its place; after an error `file` is as it was, alone."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield beside
        os.replace(beside, file)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
