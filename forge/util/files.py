"""Files: replaced atomically, and opened only if they are regular files."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `file` at the end; after an error `file` is unchanged.

    A reader sees the old file or the new one. A link named `file` is replaced, not followed.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")  # a name that no link can wait at
    try:
        yield temporary
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def regular_only(file: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file: `open(path, opener=regular_only)` follows no link and waits for no pipe."""
    try:
        descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "It is a link, which is not followed", file) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is not a regular file", file)
    return descriptor


def is_regular(file: Path) -> bool:
    """Whether a file is there and neither a link nor something special."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def read_regular(file: Path, most: int) -> bytes:
    """Return the content of a regular file; raise OSError for anything else, and for more than `most` bytes."""
    with open(file, "rb", opener=regular_only) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"It has more than {most:,} bytes", str(file))
    return content
