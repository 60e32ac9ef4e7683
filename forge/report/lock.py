"""Whether a process works in a run folder, asked from outside and without torch."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None


def is_held(run_dir: Path) -> bool | None:
    """Whether the lock of a run folder is held; None where nobody can say.

    Who holds it writes its name into the file, and empties it when it lets go.
    """
    path = run_dir / ".lock"
    try:
        if path.stat().st_size == 0:
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return None
    if _held_here(run_dir):
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


def _held_here(run_dir: Path) -> bool:
    """Asked before the file is opened: closing it again would release the lock that this process holds."""
    lock = sys.modules.get("forge.state.lock")
    return lock is not None and lock._held.get(os.path.realpath(run_dir)) == os.getpid()
