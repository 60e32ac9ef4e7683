"""Shared parts of kernels over the rows of a matrix."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x):
    """Return exp(x) by the device's own instruction, with subnormal results as 0: a third of tl.exp's instructions."""
    return tl.exp2(x * LOG2E)


@triton.jit
def log(x):
    return tl.log2(x) * LN2


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
