"""What kernels that go through the rows of a matrix share."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """x as a matrix of rows along its last dimension; without a copy where one stride leads from row to row."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 65536)  # which ROCm does not tell


def stages_that_fit(stages: int, loaded: int, device: torch.device) -> int:
    """How many stages a pipelined loop can have that loads so many bytes in a turn: `stages`, 3, or 1."""
    room = (shared_memory(device) - 8192) // loaded + 1  # one stage needs none; the rest is for reductions
    return stages if stages <= room else 3 if room >= 3 else 1


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors the device has; the interpreter counts as a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def row_grid(rows: int, at_once: int, per_processor: int, device: torch.device) -> tuple[int]:
    """A grid for programs that take `at_once` rows at a time: so many per multiprocessor, or with 0 as many as it
    takes for each to have one turn."""
    turns = triton.cdiv(rows, at_once)
    return (min(turns, processors(device) * per_processor) if per_processor else turns,)
