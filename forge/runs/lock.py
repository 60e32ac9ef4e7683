"""Lock a run folder for one process.

A POSIX record lock: the kernel releases it when the process ends in any way, and forked data workers do not inherit it.
The file stays after a release: removing it would let two processes lock two files of the same name.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path
from types import TracebackType

from forge.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

logger = logging.getLogger("forge")

NAME = ".lock"

_held: dict[str, int] = {}
"""Run folder → process that holds it: within one process the kernel would grant the lock twice."""
_warned: list[str] = []


class RunLock:
    """`with RunLock(run_dir): ...`, or `acquire` and `release`."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self._key = os.path.realpath(self.run_dir)
        self._descriptor: int | None = None
        self._pid: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise a CheckpointError that names its holder."""
        # before the file is opened: closing it would release the lock of this process
        if _held.get(self._key) == os.getpid():
            raise CheckpointError(f"{self.run_dir} is in use by another run in this process. {_ADVICE}")
        if fcntl is None:
            return _warn("this system has no file locks")
        descriptor = self._open()
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 1024, 0).decode("utf-8", "replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise CheckpointError(
                    f"{self.run_dir} is in use by {holder or 'another process'}. {_ADVICE}"
                ) from error
            return _warn(f"{self.run_dir} is on a file system without locks ({error.strerror})")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor, self._pid = descriptor, os.getpid()
        _held[self._key] = self._pid
        return None

    def _open(self) -> int:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            return os.open(self.run_dir / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CheckpointError(f"{self.run_dir / NAME} cannot be opened: {error.strerror}.") from error

    def release(self) -> None:
        """Release the lock; does nothing without a lock and in a forked child."""
        if self._descriptor is None or self._pid != os.getpid():
            return
        descriptor, self._descriptor = self._descriptor, None
        del _held[self._key]
        os.ftruncate(descriptor, 0)
        os.close(descriptor)

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_ADVICE = "Wait until it ends, or give this run another run_dir."


def _warn(why: str) -> None:
    if not _warned:
        _warned.append(why)
        logger.warning("This run folder cannot be locked against a second process: %s.", why)


def is_held(run_dir: Path) -> bool | None:
    """Whether the lock of a run folder is held; None if unknown.

    The holder writes its name into the file, and empties it on release.
    """
    path = run_dir / NAME
    try:
        if path.stat().st_size == 0:
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return None
    # before the file is opened: closing it would release the lock of this process
    if _held.get(os.path.realpath(run_dir)) == os.getpid():
        return True
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        os.close(descriptor)  # releases the lock too
    return False
