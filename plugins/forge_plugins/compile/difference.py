"""Differences between two sets of tensors, and tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Tolerance relative to the largest entry of a tensor, by the least precise dtype used."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class CompiledDifference:
    """The difference of one tensor, absolute and relative to its size."""

    name: str
    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:.3g} in {self.name}, {self.relative:.3g} of its size"


def furthest(ours: Tensors, theirs: Tensors, tolerance: float) -> CompiledDifference:
    """Return the largest relative difference of two sets of tensors; a tensor missing in one of them counts as 0.

    A gradient is compared with its own largest entry, or `tolerance` of the largest gradient if that is more: one that
    should be 0, as before a BatchNorm, is noise in both.
    """
    gradients = [_largest(tensor) for name, tensor in theirs.items() if name.startswith("the gradient")]
    floor = tolerance * max(gradients, default=0.0)
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        zero = torch.zeros_like(ours[name] if name in ours else theirs[name])
        found.append(_apart(name, ours.get(name, zero), theirs.get(name, zero), floor))
    return max(found, key=lambda difference: difference.relative)


def _apart(name: str, ours: Tensor, theirs: Tensor, floor: float) -> CompiledDifference:
    if ours.shape != theirs.shape:
        return CompiledDifference(name, math.inf, math.inf)
    if ours.numel() == 0:
        return CompiledDifference(name, 0.0, 0.0)
    a, b = _exact(ours), _exact(theirs)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    absolute = math.inf if bool(gap.isnan().any()) else float(gap.max())
    scale = max(_largest(theirs), floor if name.startswith("the gradient") else 0.0)
    return CompiledDifference(name, absolute, absolute / scale if scale > 0 else (math.inf if absolute else 0.0))


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.abs() if tensor.is_complex() else tensor.to(torch.float64)


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    finite = torch.nan_to_num(_exact(tensor), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max())


def tolerance_for(dtype: torch.dtype, device: torch.device) -> float:
    """Return the allowed difference of two tensors, relative to their size."""
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return TOLERANCES[torch.float16]  # TF32 has the mantissa of float16
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])
