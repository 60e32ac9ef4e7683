"""Recognise out-of-memory errors."""

from __future__ import annotations

import re

import torch

FULL = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|STATUS_ALLOC_FAILED", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory; those of cuBLAS, cuDNN and the CPU's allocator differ by message only."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and FULL.search(str(error)) is not None
