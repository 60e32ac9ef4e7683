"""Lock a run folder for one process.

The lock belongs to an open file description (F_OFD_SETLK), not to the process: it stays when a plugin opens and closes
the file again, say to copy the folder, and a query (F_OFD_GETLK) takes no lock, so a listing of runs never refuses a
run. It works over NFS. Where a system has no such locks, flock is used, which also belongs to the description; its
query takes a shared lock for an instant, so `acquire` tries a few times.

The kernel releases the lock when the process ends in any way. Forked processes, such as data workers, would keep it
alive, so they close its descriptor. The file stays after a release: removing it would let two processes lock two files
of the same name.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
import struct
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from forge.errors import CheckpointError
from forge.util.files import access, make_folder, regular_only

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

logger = logging.getLogger("forge")

NAME = ".lock"
SET, GET = (getattr(fcntl, f"F_OFD_{word}LK", None) for word in ("SET", "GET"))
TRIES, PAUSE = 5, 0.02
PATIENCE = 5.0
"""Seconds to wait for a lock whose holder has died: its data workers, which hold the file too, end soon after it."""

_held: dict[str, int] = {}
"""Run folder → descriptor of the lock, of this process."""
_warned: list[str] = []


def _close_in_child() -> None:
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


@cache
def _close_in_children() -> None:
    """From the first lock on; a process that locks nothing has no such handler."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """`with RunLock(run_dir): ...`, or `acquire` and `release`."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self._key = os.path.realpath(self.run_dir)
        self._descriptor: int | None = None
        self._pid: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise a CheckpointError that names its holder."""
        if self._key in _held:
            raise CheckpointError(f"{self.run_dir} is in use by another run in this process. {_ADVICE}")
        if fcntl is None:
            return _warn("this system has no file locks")
        descriptor = self._open()
        try:
            _lock(descriptor)
        except OSError as error:
            holder = os.pread(descriptor, 1024, 0).decode("utf-8", "replace").strip()
            os.close(descriptor)
            if _is_conflict(error):
                raise CheckpointError(
                    f"{self.run_dir} is in use by {holder or 'another process'}. {_ADVICE}"
                ) from error
            return _warn(f"{self.run_dir} is on a file system without locks ({error.strerror})")
        self._write_holder(descriptor)
        self._descriptor, self._pid = descriptor, os.getpid()
        _close_in_children()
        _held[self._key] = descriptor
        return None

    def _write_holder(self, descriptor: int) -> None:
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(f"{self.run_dir / NAME} cannot be written: {error.strerror}.") from error

    def _open(self) -> int:
        try:
            make_folder(self.run_dir)
            file, mode = self.run_dir / NAME, access(self.run_dir, 6)
            is_new = not file.exists()
            descriptor = regular_only(str(file), os.O_RDWR | os.O_CREAT, mode)
            if is_new:
                os.fchmod(descriptor, mode)  # despite the umask
            return descriptor
        except OSError as error:
            raise CheckpointError(f"{self.run_dir / NAME} cannot be opened: {error.strerror}.") from error

    def release(self) -> None:
        """Release the lock; does nothing without a lock and in a forked child."""
        if self._descriptor is None or self._pid != os.getpid():
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.pop(self._key, None)
        with suppress(OSError):  # the name of a former holder harms nothing; an error here would hide the run's end
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
        if path.lstat().st_size == 0:
            return False
        descriptor = regular_only(str(path), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return _is_locked(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take an exclusive lock, or raise the last OSError."""
    end = time.monotonic() + PATIENCE
    for attempt in itertools.count(1):
        try:
            _lock_once(descriptor)
            return
        except OSError as error:
            is_over = attempt >= TRIES and not (_holder_has_died(descriptor) and time.monotonic() < end)
            if not _is_conflict(error) or is_over:
                raise
            time.sleep(PAUSE)


def _holder_has_died(descriptor: int) -> bool:
    """Whether the process that wrote its number into the lock's file is gone; False on another machine."""
    words = os.pread(descriptor, 1024, 0).decode("utf-8", "replace").split()
    if len(words) != 4 or not words[1].isdigit() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _lock_once(descriptor: int) -> None:
    assert fcntl is not None
    if SET is not None:
        try:
            fcntl.fcntl(descriptor, SET, _whole_file(fcntl.F_WRLCK))
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without these locks
                raise
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(descriptor: int) -> bool | None:
    """Whether another description of this file has an exclusive lock; None on a system without locks."""
    if fcntl is None:
        return None
    if SET is not None and GET is not None:
        try:
            answer = fcntl.fcntl(descriptor, GET, _whole_file(fcntl.F_RDLCK))
            return struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases it
    except OSError as error:
        if _is_conflict(error):
            return True
        raise
    return False


def _whole_file(kind: int) -> bytes:
    """Return a struct flock: kind, whence, start, length (0: to the end), process (always 0)."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


def _is_conflict(error: OSError) -> bool:
    return error.errno in (errno.EAGAIN, errno.EACCES)
