"""Does an update read the device? A capture could not bear it."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from forge.places import near

SYNC = "called a synchronizing CUDA operation"
"""What torch's sync debug mode says."""


@contextmanager
def reads_of_the_device() -> Iterator[list[str]]:
    """The places where the host waits for the device meanwhile, filled in at the end: `model.py:12 (loss.item())`."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if SYNC in str(warning.message):
            line = linecache.getline(warning.filename, warning.lineno).strip()
            found.append(f"{near(warning.filename)}:{warning.lineno} ({line})")
        elif "prototype feature" not in str(warning.message):  # it says so of the mode itself
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
