"""The grids of 8-bit integers that training (the plugin `qat`) and export (`forge_ship.quantize`) share.

An activation has one scale and one zero point for the whole tensor, and 0 is exactly on the grid. A weight has one
scale per output channel, and its zero point is 0. A batch norm folded into a weight scales whole channels, so a weight
has the same integers before and after.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 255
"Steps of an activation's grid: the integers 0 to 255."
LARGEST = 127
"The integers of a weight are -127 to 127."
SMALLEST_SCALE = torch.finfo(torch.float32).eps


def activation_grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale (float32) and zero point (int32) of activations that range from `low` to `high`, as tensors."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / STEPS).clamp(min=SMALLEST_SCALE)
    return scale, torch.round(-low / scale).clamp(0, STEPS).to(torch.int32)


def weight_scale(weight: Tensor) -> Tensor:
    """Return the scale of each output channel, the first dimension of a weight, in float32."""
    largest = weight.detach().float().abs().amax(dim=tuple(range(1, weight.dim())))
    return (largest / LARGEST).clamp(min=SMALLEST_SCALE)
