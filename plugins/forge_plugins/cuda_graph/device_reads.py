"""Find reads of the device in an update, which would break a capture."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from forge_plugins.common.syncs import Listener, own_line


@contextmanager
def reads_of_the_device() -> Iterator[list[str]]:
    """Collect the lines where the host waits for the device inside the `with`: `model.py:12 (loss.item())`."""
    found: list[str] = []
    listener = Listener(lambda frame: found.append(own_line(traceback.extract_stack(frame))))
    listener.start()
    try:
        yield found
    finally:
        listener.stop()
