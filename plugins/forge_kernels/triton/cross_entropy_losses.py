"""Launches of the kernel for losses of rows of logits, with or without their gradient."""

# A type checker cannot read Triton's language.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from forge_kernels.contract import INTERPRETED
from forge_kernels.triton.cross_entropy_plan import plan
from forge_kernels.triton.cross_entropy_rows import split_rows

PATIENCE = 0 if INTERPRETED else 1024
"""How often a program polls for the words of the others, about a microsecond each, before it marks its part as late. In
Triton's interpreter programs run one after another, so waiting is useless."""

NVIDIA = torch.version.hip is None
FEW_REGISTERS = {"maxnreg": 64} if NVIDIA else {}
WARP = 32 if NVIDIA else 64


def losses_with_gradient(
    logits: Tensor, gradient: Tensor, target: Tensor, scale: Tensor, ignore: int, smoothing: float, z_loss: float
) -> Tensor:
    """Return the losses of the rows; write their gradient times scale to `gradient`, which may be `logits`."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch(logits, gradient, target, losses, None, None, scale, ignore, smoothing, z_loss)
    return losses


def losses_only(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of the rows, with maximum and Σ exp(x - maximum) of each row that is not ignored."""
    losses, tops, totals = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3))
    _launch(logits, None, target, losses, tops, totals, None, ignore, smoothing, z_loss)
    return losses, tops, totals


def _launch(logits, gradient, target, losses, tops, totals, scale, ignore, smoothing, z_loss) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    parts, pieces, block, warps = plan(columns, logits.element_size())
    # the number of late parts, then the words
    words = torch.zeros(1 + (2 if smoothing else 1) * rows * parts, dtype=torch.int64, device=logits.device)
    late = torch.empty(rows * parts if parts > 1 else 0, dtype=torch.int32, device=logits.device)
    unused = logits  # a pointer that is never read
    args = (
        logits,
        unused if gradient is None else gradient,
        target,
        losses,
        unused if tops is None else tops,
        unused if totals is None else totals,
        words,
        late,
        unused if scale is None else scale,
        rows,
        columns,
        logits.stride(0),
        0 if gradient is None else gradient.stride(0),
        ignore,
        smoothing,
        z_loss,
    )
    options = {
        "GRADIENT": gradient is not None,
        "SMOOTH": smoothing != 0,
        "PACKED": logits.element_size() == 2 and block == 1024 and _has_packed_maximum(logits.device),
        "PATIENCE": PATIENCE,
        "PARTS": parts,
        "PARTS_PADDED": warps * WARP,  # one word per thread: see cross_entropy_words
        "PIECES": pieces,
        "BLOCK": block,
        "num_warps": warps,
    }
    split_rows[(rows * parts,)](*args, LATE=False, **options, **FEW_REGISTERS)
    if parts > 1:
        split_rows[(min(rows * parts, 512),)](*args, LATE=True, **options)


@cache
def _has_packed_maximum(device: torch.device) -> bool:
    return NVIDIA and not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 0)
