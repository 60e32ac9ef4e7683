"""Garbage of the main process is not collected in its forked workers.

A worker inherits what the main process has not collected yet, but not its threads. To free a process group there, or
anything else that joins its threads, waits forever or is a segmentation fault; and the first collection can come before
a line of the worker's own has run. So the main process collects nothing while workers start, and a worker takes what it
inherited out of collection before it collects anything.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_starting = threading.RLock()
_paused = False
"""Whether collections are off only because workers start; a worker that was forked finds it so."""


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect nothing in this process, nor in one that is forked meanwhile, until that calls `leave_inherited`."""
    global _paused
    with _starting:  # two threads that start workers would switch collections on for each other
        before, enabled = _paused, gc.isenabled()
        _paused = before or enabled
        gc.disable()
        try:
            yield
        finally:
            _paused = before
            if enabled:
                gc.enable()


def leave_inherited() -> None:
    """Begin to collect in a new worker: only what it makes itself."""
    global _paused
    gc.freeze()
    if _paused:
        gc.enable()
    _paused = False
