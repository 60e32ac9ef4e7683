"""Atomic writes: a reader sees the old file or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `file` at the end; after an error `file` is unchanged."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
