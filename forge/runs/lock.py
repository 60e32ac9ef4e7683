"""RunLock: one process per run folder.

A POSIX record lock: the kernel lets go of it when the process ends in whatever way, and forked data workers do not
inherit it. The file stays when the lock is released: removing it would let two processes lock two files of one name.
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
"""Run folder → process that holds it. Within one process the kernel would grant the lock twice."""
_warned: list[str] = []


class RunLock:
    """`with RunLock(run_dir): ...`, or `acquire` and `release`."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self._key = os.path.realpath(self.run_dir)
        self._descriptor: int | None = None
        self._pid: int | None = None

    def acquire(self) -> None:
        """Take the lock; a CheckpointError names the process that has it."""
        # before the file is opened: closing it again would release the lock that this process holds
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
        """Let go; without a lock, and in a forked child, this does nothing."""
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
        logger.warning("Nothing keeps a second process out of this run folder: %s.", why)


def is_held(run_dir: Path) -> bool | None:
    """Whether the lock of a run folder is held; None where nobody can say.

    Who holds it writes its name into the file, and empties it when it lets go.
    """
    path = run_dir / NAME
    try:
        if path.stat().st_size == 0:
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return None
    # asked before the file is opened: closing it again would release the lock that this process holds
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
        os.close(descriptor)  # which lets go of it too
    return False
