"""Compare weights bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Weights = nn.Module | Mapping[str, Tensor]


def assert_same_weights(actual: Weights, expected: Weights) -> None:
    """Raise unless two modules (or state dicts) are equal bit for bit, and name the first tensor that differs."""
    difference = first_difference(actual, expected)
    assert difference is None, difference


def first_difference(actual: Weights, expected: Weights) -> str | None:
    """Describe the first difference, or return None. Buffers count; NaN equals NaN, and 0.0 is not -0.0."""
    ours, theirs = _tensors(actual), _tensors(expected)
    for name in [*theirs, *ours]:
        if name not in ours or name not in theirs:
            return f"{name} is only in the {'expected' if name in theirs else 'actual'} weights."
        difference = _difference(ours[name], theirs[name])
        if difference:
            return f"{name} differs: {difference}"
    return None


def _tensors(weights: Weights) -> Mapping[str, Tensor]:
    return weights.state_dict() if isinstance(weights, nn.Module) else weights


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}."
    a, b = a.detach().cpu(), b.detach().cpu()
    unequal = (_bytes(a) != _bytes(b)).any(1)
    if not bool(unequal.any()):
        return ""
    distance = (a.double() - b.double()).abs().max().item() if not a.is_complex() else (a - b).abs().max().item()
    return f"{int(unequal.sum())} of {a.numel()} entries, by up to {distance:.3g}."


def _bytes(tensor: Tensor) -> Tensor:
    """Return one row of bytes per entry."""
    # a dimension of no or one entry may have any stride, which a view as bytes refuses
    return tensor.contiguous().as_strided((tensor.numel(), 1), (1, 1)).view(torch.uint8)
