"""Shared parts of kernels over the rows of a matrix."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """View x as a matrix of rows along its last dimension; copy only if rows have no common stride."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 65536)  # missing on ROCm


def stages_that_fit(stages: int, loaded: int, device: torch.device) -> int:
    """Return the number of stages for a pipelined loop that loads so many bytes per turn: `stages`, 3, or 1."""
    room = (shared_memory(device) - 8192) // loaded + 1  # one stage needs none; 8 KB are for reductions
    return stages if stages <= room else 3 if room >= 3 else 1


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; the interpreter counts as a small device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def row_grid(rows: int, at_once: int, per_processor: int, device: torch.device) -> tuple[int]:
    """Return a grid for programs that take `at_once` rows at a time: so many per multiprocessor, or with 0 one turn per
    program."""
    turns = triton.cdiv(rows, at_once)
    return (min(turns, processors(device) * per_processor) if per_processor else turns,)
