"""Does an update read the device? A capture could not bear it."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from forge.places import near

SYNC = "called a synchronizing CUDA operation"
"""What torch's sync debug mode says."""
WITHIN = ("/torch/", "/forge/", "/forge_plugins/", "/pluggy/", "warnings.py")
"""Files that are never the line to look at."""


@contextmanager
def reads_of_the_device() -> Iterator[list[str]]:
    """The places where the host waits for the device meanwhile, in the order found: `model.py:12 (loss.item())`."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        told = warnings.showwarning

        def listen(message: Warning | str, *others: Any, **named: Any) -> None:
            # torch warns from inside the call, so the stack still shows where it is
            if SYNC in str(message):
                found.append(own_line(traceback.extract_stack()))
            elif "prototype feature" not in str(message):  # it says so of the mode itself
                told(message, *others, **named)

        warnings.showwarning = listen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def own_line(frames: traceback.StackSummary) -> str:
    """The innermost line that is neither torch's nor forge's, as `file:line (code)`; else the innermost of all."""
    own = [frame for frame in frames if not any(part in frame.filename.replace("\\", "/") for part in WITHIN)]
    frame = (own or list(frames))[-1]
    return f"{near(frame.filename)}:{frame.lineno} ({frame.line})"
