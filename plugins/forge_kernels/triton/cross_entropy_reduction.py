"""Reduce the losses of rows: mean over targets that are not ignored, or sum."""

# pyright: reportCallIssue=false
# (launch options such as num_warps are not parameters of the kernel)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _count(target, scale, rows, ignore, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Store scale = 1 / (number of targets that are not ignored), or 1."""
    if MEAN:
        counts = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, rows, BLOCK):
            at = start + tl.arange(0, BLOCK)
            counts += (tl.load(target + at, mask=at < rows, other=ignore) != ignore).to(tl.int32)
        tl.store(scale, 1.0 / tl.sum(counts, 0).to(tl.float32))
    else:
        tl.store(scale, 1.0)


@triton.jit
def _total(losses, scale, out, rows, BLOCK: tl.constexpr):
    """Store out = scale · sum of losses, in a fixed order."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + at, mask=at < rows, other=0.0)
    tl.store(out, tl.sum(sums, 0) * tl.load(scale))


def count_targets(target: Tensor, ignore: int, mean: bool) -> Tensor:
    """Return one float on the device: 1 over the number of targets that are not ignored, or 1."""
    scale = torch.empty(1, dtype=torch.float32, device=target.device)
    _count[(1,)](target, scale, target.numel(), ignore, mean, BLOCK=4096, num_warps=8)
    return scale


def total_loss(losses: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty((), dtype=torch.float32, device=losses.device)
    _total[(1,)](losses, scale, out, losses.numel(), BLOCK=4096, num_warps=8)
    return out
