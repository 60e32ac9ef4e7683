"""linear_cross_entropy: the head of a language model and its loss, without storing all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import Kernel, falls_back, triton_module, unusable
from forge_kernels.ops.cross_entropy import MOST_CLASSES, check_loss
from forge_kernels.ops.cross_entropy import reference as loss_of_logits

ops = triton_module("linear_cross_entropy")

LOGITS = 2**29
"""Default bytes of logits per chunk: half a GiB keeps the matrix products at full speed."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return cross_entropy(hidden @ weight.T + bias, target) in float32, with the logits of `chunk` tokens at a time.

    `hidden` is (..., width), `weight` (classes, width), `target` (...). Gradients are computed with the loss, chunk by
    chunk, so that peak memory depends on `chunk` × classes and not on the number of tokens. By default a chunk has half
    a GiB of logits; smaller ones save memory, and below 1024 tokens cost speed.

    Activations may be bfloat16 with a float32 weight, as under autocast: the weight is cast once, and its gradient
    accumulates in float32. The gradient of a bfloat16 weight accumulates in bfloat16, rounded once per chunk: over n
    chunks it is off by up to about √n roundings. Under autocast the activations are cast first, as by `F.linear`.
    float16, whose gradient must be scaled first, and `reduction="none"` run as plain torch. A second derivative is an
    error.
    """
    _check(hidden, weight, target, bias, label_smoothing, reduction, chunk)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if falls_back("linear_cross_entropy", supports(hidden, weight, target, bias, reduction=reduction)):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return reference(hidden, weight, target, bias, reduction=reduction, **options)
    learns = torch.is_grad_enabled()
    wanted = [learns and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    return ops.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        target.reshape(-1),
        ignore_index,
        label_smoothing,
        reduction == "mean",
        _chunk(weight.shape[0] * hidden.itemsize) if chunk is None else chunk,
        wanted,
    )[0]


def _chunk(bytes_per_token: int) -> int:
    """Return the largest power of two of tokens whose logits fit: whole tiles, and the same for every batch."""
    return max(256, 1 << (LOGITS // bytes_per_token).bit_length() - 1)


def reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, chunk: int | None = None, **options: Any
) -> Tensor:
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    return loss_of_logits(logits, target, **options)


def supports(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, reduction: str = "mean", **options: Any
) -> str | None:
    if reduction == "none":
        return "reduction='none' needs the gradient of every loss before the weight's"
    if weight.shape[0] > MOST_CLASSES:
        return f"it supports at most {MOST_CLASSES:,} classes"
    if weight.dtype not in (hidden.dtype, torch.float32):
        return "it needs hidden and weight of one dtype, or a float32 weight"
    return unusable(hidden, weight, bias, dtypes=(torch.bfloat16, torch.float32))


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    reduction: str,
    chunk: int | None,
) -> None:
    name = "forge.kernels.linear_cross_entropy"
    if (
        hidden.dim() < 2
        or weight.dim() != 2
        or hidden.shape[-1] != weight.shape[1]
        or weight.shape[0] == 0
        or not (hidden.is_floating_point() and weight.is_floating_point())
    ):
        raise KernelError(
            f"{name} needs floating-point hidden (..., width) and weight (classes, width); it got "
            f"{tuple(hidden.shape)} {hidden.dtype} and {tuple(weight.shape)} {weight.dtype}."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise KernelError(
            f"{name} needs a floating-point bias of {tuple(weight.shape[:1])}; it got {tuple(bias.shape)} {bias.dtype}."
        )
    if weight.device != hidden.device or (bias is not None and bias.device != hidden.device):
        raise KernelError(f"{name} needs all its tensors on one device.")
    if chunk is not None and chunk < 1:
        raise KernelError(f"{name} needs a chunk of at least 1 token; it got {chunk}.")
    check_loss(name, "hidden", hidden, target, label_smoothing, reduction)


LINEAR_CROSS_ENTROPY = Kernel(
    name="linear_cross_entropy",
    function=linear_cross_entropy,
    reference=reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1.2e-2},
)
