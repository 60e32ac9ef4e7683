"""A linear layer whose three products are computed in float8, with one scale per tensor, computed in every call.

torch.compile traces all of it: the scales are values in the graph, so that casts are fused with what is around them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_speed.torch_internals import scaled_mm

FLOAT8 = torch.float8_e4m3fn
"""The type of inputs, weights and gradients. A scale of each call gives gradients the range they need; with
the two bits of e5m2 losses stay above those of bfloat16."""
TOP = torch.finfo(FLOAT8).max
TILE = 16
"""`scaled_mm` takes matrices whose sides are multiples of this."""
SMALLEST = 1e-30
"""The least value that counts as a tensor's largest: both scale and its inverse are ordinary float32 numbers."""
LEAST_ROWS = "fp8_least_rows"
"""The attribute of an installed layer: inputs of fewer rows are computed as written."""


def install(layer: nn.Linear, least_rows: int = TILE) -> None:
    """Make a layer compute in float8 while it trains; `remove` undoes it."""
    vars(layer)[LEAST_ROWS] = least_rows
    # a bound method: a copy of the layer gets one bound to the copy
    vars(layer)["forward"] = MethodType(forward, layer)


def remove(layer: nn.Module) -> None:
    """Restore a layer's own forward."""
    for name in ("forward", LEAST_ROWS):
        vars(layer).pop(name, None)


def forward(self: Any, x: Tensor) -> Tensor:
    """The forward of an nn.Linear, in float8 where the input allows it."""
    autocast = torch.is_autocast_enabled(x.device.type)
    if not _takes(self, x, autocast):
        return F.linear(x, self.weight, self.bias)
    y = Float8Products.apply(x.reshape(-1, self.in_features), self.weight, self.bias)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    return y.view(*x.shape[:-1], self.out_features).to(dtype)


def _takes(layer: Any, x: Tensor, autocast: bool) -> bool:
    if not (layer.training or torch.is_grad_enabled()):  # an evaluation
        return False
    if x.dim() == 0 or x.shape[-1] != layer.in_features or not x.is_floating_point() or x.dtype is torch.float64:
        return False
    if not autocast and x.dtype is not layer.weight.dtype:  # torch refuses it by its own words
        return False
    rows = x.numel() // layer.in_features
    return rows % TILE == 0 and rows >= layer.fp8_least_rows


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


class Float8Products(torch.autograd.Function):
    """y = x wᵀ + b for an x of two dimensions, and its gradients; results are bfloat16, gradients as their inputs.

    The input is kept for backward in float8: half of what bfloat16 would keep. The weight is kept as it is and cast
    again, so that no second copy of it waits for backward, and shards can be freed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        most_x, most_w = largest(x), largest(weight)
        x8, w8 = encode(x, most_x), encode(weight, most_w)
        ctx.save_for_backward(x8, most_x, weight, most_w)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        b = None if bias is None else bias.to(torch.bfloat16)
        return product(x8, w8.t(), step_of(most_x), step_of(most_w), b, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = gradients
        x8, most_x, weight, most_w = ctx.saved_tensors
        of_x, of_w, of_b = ctx.needs_input_grad
        kind, kind_of_b = ctx.dtypes
        most = largest(grad)
        g8, step = encode(grad, most), step_of(most)
        grad_x = grad_w = grad_b = None
        if of_x:
            w8 = encode(weight, most_w)
            grad_x = product(g8, column_major(w8), step, step_of(most_w), fast=True).to(kind)
        if of_w:
            g8t = g8.t().contiguous()
            grad_w = product(g8t, column_major(x8), step, step_of(most_x)).to(weight.dtype)
        if of_b:
            grad_b = grad.sum(0, dtype=torch.float32).to(kind_of_b)
        return grad_x, grad_w, grad_b


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value in float32; NaN if there is one."""
    return x.abs().amax().float().clamp(min=SMALLEST)


def encode(x: Tensor, most: Tensor) -> Tensor:
    """Cast to float8 such that the largest value becomes the largest of the type; infinities become NaN."""
    return (x.float() * (TOP / most)).clamp(-TOP, TOP).to(FLOAT8).contiguous()


def step_of(most: Tensor) -> Tensor:
    """Return the factor that turns encoded values back."""
    return most / TOP


def column_major(x: Tensor) -> Tensor:
    """Return a matrix with the same values whose columns are contiguous, as a second factor has to be."""
    return x.t().contiguous().t()


def product(
    a: Tensor, b: Tensor, step_a: Tensor, step_b: Tensor, bias: Tensor | None = None, fast: bool = False
) -> Tensor:
    """Multiply encoded matrices into bfloat16. `fast` sums in fewer bits: sums over features can afford it, those over
    the rows of a batch are long, and losses show it."""
    return scaled_mm(a, b, scale_a=step_a, scale_b=step_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
