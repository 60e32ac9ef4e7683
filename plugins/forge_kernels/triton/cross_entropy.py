"""Cross-entropy of logits with its gradient, computed in forward; and what linear_cross_entropy shares with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of, refuse_second_derivative
from forge_kernels.torch_internals import is_last_backward
from forge_kernels.triton.cross_entropy_rows import losses_with_gradient


def scale_of(target: Tensor, ignore: int, mean: bool) -> Tensor:
    """Return one float on the device: 1 over the number of targets that are not ignored, or 1."""
    return (target != ignore).sum().float().reciprocal() if mean else target.new_ones((), dtype=torch.float32)


@triton.jit
def _scale(values, factor, count, BLOCK: tl.constexpr):
    times = tl.load(factor)
    if times != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < count, other=0).to(tl.float32)
            tl.store(values + at, (x * times).to(values.dtype.element_ty), mask=at < count)


@custom_op("forge::scale_", mutates_args=("values",))
def scale_(values: Tensor, factor: Tensor) -> None:
    """Compute values *= factor, one float on the device; leave memory untouched if it is 1. Values are contiguous."""
    programs = min(triton.cdiv(values.numel(), 8192), 1024)
    if programs:
        with device_of(values):
            _scale[(programs,)](values, factor, values.numel(), BLOCK=8192, num_warps=8)


def times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return gradient · factor, for a backward: in place if the graph is used once, so that a factor of 1 is free."""
    if torch.compiler.is_compiling() or not is_last_backward():
        return gradient * factor
    scale_(gradient, factor)
    return gradient


@custom_op("forge::cross_entropy", mutates_args=("gradient",))
def cross_entropy(
    logits: Tensor, gradient: Tensor, target: Tensor, ignore: int, smoothing: float, mean: bool
) -> Tensor:
    """Return the loss; write its gradient to `gradient`, which may be `logits`. Both have contiguous columns."""
    target = target.contiguous()
    with device_of(logits):
        scale = scale_of(target, ignore, mean)
        losses = losses_with_gradient(logits, gradient, target, scale, ignore, smoothing)
    return losses.sum() * scale


@cross_entropy.register_fake
def _(logits: Tensor, gradient: Tensor, target: Tensor, ignore: int, smoothing: float, mean: bool) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


class CrossEntropy(torch.autograd.Function):
    """Computes the gradient of the logits in forward; backward multiplies it by the gradient of the loss."""

    @staticmethod
    def forward(ctx, logits, target, ignore, smoothing, mean):
        values = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
        # a copy may be overwritten
        gradient = values if values is not logits else torch.empty_like(logits, memory_format=torch.contiguous_format)
        loss = cross_entropy(values, gradient, target, ignore, smoothing, mean)
        ctx.save_for_backward(gradient.detach())
        return loss

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative("cross_entropy")
        (gradient,) = ctx.saved_tensors
        return times(gradient, grads[0]), None, None, None, None
