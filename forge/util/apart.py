"""A copy of this process that shares nothing with it.

`fork` copies a process at no cost, with its objects, closures, classes and globals. It leaves some things shared: the
positions of open files, sockets and pipes, shared memory. The copy replaces them by its own, so that whatever it does,
the process it was copied from does not notice.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forge.util.fork_garbage import collections_paused, leave_inherited

MAPPING = re.compile(r"(?P<start>\w+)-(?P<end>\w+) (?P<mode>\S{4}) (?P<offset>\w+) \S+ \d+ *(?P<path>.*)")
MAP_FIXED = 0x10
LARGEST = 2**30
"""Bytes of a file, or of shared memory, that are copied."""
PR_SET_PDEATHSIG = 1


def can_fork() -> bool:
    """Whether a process can be copied here: only Linux tells what a copy shares."""
    return sys.platform == "linux" and Path("/proc/self/maps").exists()


class Copy:
    """A copy of this process as it is now, which calls `work` with its end of a connection, and ends."""

    def __init__(self, work: Callable[[Connection], None]):
        self.connection, theirs = Pipe()
        self.process = fork_apart((theirs.fileno(),))
        if self.process == 0:
            try:
                theirs.send("apart")
                work(theirs)
            finally:
                os._exit(0)  # a copy must never return to the user's program
        theirs.close()
        with suppress(EOFError):
            self.connection.recv()  # until then a file that is read here moves on there too

    def tell(self, what: Any) -> None:
        """Send it something, if it is still there."""
        with suppress(OSError):
            self.connection.send(what)

    def hear(self, patience: float | None = None) -> Any:
        """Return what it says next; raise TimeoutError after so many seconds, EOFError once it has ended."""
        if not self.connection.poll(patience):
            raise TimeoutError
        try:
            return self.connection.recv()
        except OSError as error:  # within a message
            raise EOFError from error

    def end(self) -> None:
        """End it, whatever it does."""
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def fork_apart(keep: Collection[int]) -> int:
    """Fork; return 0 in the copy, which shares nothing but the file descriptors `keep`, and prints nothing.

    The copy has a low priority, ends with this process, and does not hear the terminal's signals. Where memory is
    short, it is what goes.
    """
    pause_openmp()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning), collections_paused():
        process = os.fork()  # Python warns of threads, which a copy does not have
        if process == 0:
            leave_inherited()
    if process == 0:
        end_with_parent()
        os.setpgid(0, 0)
        os.nice(10)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0)
        own_files(keep)
        own_memory()
    return process


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pause_openmp() -> None:
    """Let OpenMP's threads go, which start again when needed: a copy would wait for threads that it does not have."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "omp" in line.rpartition("/")[2]}
    for path in libraries:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(1)


def own_files(keep: Collection[int]) -> None:
    """Give this process its own positions in the files it reads, and its own copies of those it reads and writes.

    What it only writes, pipes and sockets lead nowhere.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):
            mode, access = os.fstat(number).st_mode, fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
            if number in (*keep, nowhere) or stat.S_ISDIR(mode):
                continue
            own = nowhere
            if stat.S_ISREG(mode) and access != os.O_WRONLY:
                own = os.open(f"/proc/self/fd/{number}", os.O_RDONLY)
                if access == os.O_RDWR and os.fstat(number).st_size <= LARGEST:
                    own = _copied(own)
                os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, number, inheritable=os.get_inheritable(number))
            if own != nowhere:
                os.close(own)
    # a notebook's are no files
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115


def _copied(file: int) -> int:
    copy = os.memfd_create("copy")
    while os.sendfile(copy, file, None, 2**30):
        pass
    os.close(file)
    return copy


def own_memory() -> None:
    """Replace writable memory that is shared with other processes by a private copy at the same place."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with open("/proc/self/maps") as maps:
        shared = [found for line in maps if (found := MAPPING.match(line)) and found["mode"].startswith("rw-s")]
    for found in shared:
        start, size = int(found["start"], 16), int(found["end"], 16) - int(found["start"], 16)
        if os.path.isfile(found["path"]):  # its pages are copied when they are written
            file = os.open(found["path"], os.O_RDONLY)
            place = libc.mmap(start, size, access, mmap.MAP_PRIVATE | MAP_FIXED, file, int(found["offset"], 16))
            os.close(file)
        elif size > LARGEST:
            raise MemoryError(f"{size / 2**30:.1f} GiB of memory are shared with other processes.")
        else:
            kept = ctypes.string_at(start, size)
            place = libc.mmap(start, size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, 0)
            ctypes.memmove(start, kept, size)
        if place != start:
            raise OSError(ctypes.get_errno(), "shared memory cannot be copied")
