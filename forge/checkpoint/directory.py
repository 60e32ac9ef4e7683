"""Open the files of a checkpoint by name inside one directory, never through a link.

The files of thousands of ranks cannot all be open at once. A file that is reopened must be the one that was checked.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path

from forge.errors import CheckpointError

MOST_OPEN = 64


class Directory:
    """An open directory; `stack` closes it and its open files."""

    def __init__(self, path: Path, stack: ExitStack):
        self.path = path
        self._descriptor = _open_directory(path)
        stack.callback(os.close, self._descriptor)
        stack.callback(self._close)
        self._streams: OrderedDict[str, io.FileIO] = OrderedDict()
        self._seen: dict[str, tuple[int, ...]] = {}

    def open(self, name: str) -> io.FileIO:
        """Return a regular file of the directory, at any position; the most recently used stay open."""
        if name not in self._streams:
            stream = _open(self._descriptor, name, self.path)
            self._streams[name] = stream
            if self._seen.setdefault(name, _identity(stream)) != _identity(stream):
                raise CheckpointError(f"{self.path / name} changed while it was read.")
            if len(self._streams) > MOST_OPEN:
                self._streams.popitem(last=False)[1].close()
        self._streams.move_to_end(name)
        return self._streams[name]

    def size(self, name: str) -> int:
        return os.fstat(self.open(name).fileno()).st_size

    def read(self, name: str, size: int) -> bytes:
        """Return the first `size` bytes of a file."""
        stream, pieces = self.open(name), []
        stream.seek(0)
        while size and (piece := stream.read(size)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def _identity(stream: io.FileIO) -> tuple[int, ...]:
    state = os.fstat(stream.fileno())
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint at {path}.") from error
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, not a checkpoint. StoredCheckpoint.find follows it.") from error
        if error.errno == errno.ENOTDIR:
            raise CheckpointError(f"{path} is not a directory, so it is not a checkpoint.") from error
        raise


def _open(directory: int, name: str, path: Path) -> io.FileIO:
    try:
        # O_NONBLOCK: opening a pipe without a writer would block forever
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is incomplete: it has no {name}.") from error
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be opened as a plain file: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path / name} is not a regular file.")
    return io.FileIO(descriptor, "rb")
