"""One loss of the losses of many rows: their mean over the targets that count, or their sum."""

# pyright: reportCallIssue=false
# (launch options such as num_warps are not parameters of the kernel)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _count(target, scale, rows, ignore, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """scale = 1 / (targets that count), or 1."""
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
    """out = scale · the sum of losses, always in the same order."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + at, mask=at < rows, other=0.0)
    tl.store(out, tl.sum(sums, 0) * tl.load(scale))


def count_targets(target: Tensor, ignore: int, mean: bool) -> Tensor:
    """One float on the device: 1 over the number of targets that count, or 1."""
    scale = torch.empty(1, dtype=torch.float32, device=target.device)
    _count[(1,)](target, scale, target.numel(), ignore, mean, BLOCK=4096, num_warps=8)
    return scale


def total_loss(losses: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty((), dtype=torch.float32, device=losses.device)
    _total[(1,)](losses, scale, out, losses.numel(), BLOCK=4096, num_warps=8)
    return out
