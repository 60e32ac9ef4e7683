"""The allocator of torch's CPU tensors. No import of torch here: its libraries read these settings as they load."""

from __future__ import annotations

import os

KEPT = 10_000
"""Milliseconds for which memory that was freed stays with the process."""


def keep_freed_memory() -> None:
    """Keep memory that torch frees for the next batch, instead of asking the system for every page of it again.

    torch allocates with mimalloc on ARM, which gives pages back 10 ms after they were freed: the activations of a batch
    that takes longer are paged in again by the next one. Call this before torch is imported; later it does nothing. A
    setting of the user's stays. Other allocators do not look at it.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", str(KEPT))
