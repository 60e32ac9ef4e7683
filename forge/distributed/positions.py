"""Positions in a sequence that ranks may divide."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.errors import TaskError

_own: Tensor | None = None


def positions(x: Tensor, dim: int = 1) -> Tensor:
    """Return the position of each element of `x` along `dim`: 0, 1, 2, …

    Under a strategy that divides sequences a rank has a slice of each, and these are the positions of the slice in the
    whole sequence. Use it in place of `torch.arange(x.shape[1])` for embeddings of positions and rotations.
    """
    own, length = _own, x.shape[dim]
    if own is None:
        return torch.arange(length, device=x.device)
    if own.shape[0] != length:
        raise TaskError(
            f"forge.positions: dimension {dim} of a tensor of shape {tuple(x.shape)} has {length} elements, but this "
            f"rank's slice of the sequence has {own.shape[0]}. Pass a tensor with the slice, and its dimension."
        )
    return own.to(x.device)


def set_slice(own: Tensor | None) -> None:
    """Set what `positions` returns: the positions of this rank's slice; None: those of whole sequences."""
    global _own
    _own = own
