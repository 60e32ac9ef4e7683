"""Cross-entropy operators: losses alone, losses with their gradient in one pass, and the gradient in backward."""

# pyright: reportCallIssue=false
# (launch options such as num_warps are not parameters of the kernel)

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of, refuse_second_derivative
from forge_kernels.triton.cross_entropy_backward import backward
from forge_kernels.triton.cross_entropy_losses import losses_only, losses_with_gradient
from forge_kernels.triton.cross_entropy_reduction import count_targets, total_loss
from forge_kernels.triton.scale import times


def row_major(logits: Tensor) -> Tensor:
    """Return the rows with contiguous columns, without a copy if possible."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


@custom_op("forge::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and the maximum and sum of every row and the scale, for its gradient."""
    logits, target = row_major(logits), target.contiguous()
    with device_of(logits):
        scale = count_targets(target, ignore, reduction == "mean")
        losses, tops, totals = losses_only(logits, target, ignore, smoothing, z_loss)
        return losses if reduction == "none" else total_loss(losses, scale), tops, totals, scale


@cross_entropy.register_fake
def _(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    loss = torch.empty_like(rows) if reduction == "none" else logits.new_empty((), dtype=torch.float32)
    return loss, rows, torch.empty_like(rows), logits.new_empty(1, dtype=torch.float32)


@custom_op("forge::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    tops: Tensor,
    totals: Tensor,
    scale: Tensor,
    ignore: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    logits, target, grad = row_major(logits), target.contiguous(), grad.contiguous()
    rows, columns = logits.shape
    gradient = torch.empty(rows, columns, dtype=logits.dtype, device=logits.device)
    if rows == 0:
        return gradient
    block = min(4096, triton.next_power_of_2(columns))
    blocks = triton.cdiv(columns, block)
    with device_of(logits):
        backward[(rows * blocks,)](
            grad,
            grad.dim(),  # one gradient per row, or one for all
            logits,
            target,
            tops,
            totals,
            scale,
            gradient,
            columns,
            logits.stride(0),
            ignore,
            smoothing,
            z_loss,
            BLOCKS=blocks,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
        )
    return gradient


@cross_entropy_backward.register_fake
def _(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    tops: Tensor,
    totals: Tensor,
    scale: Tensor,
    ignore: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep(ctx, inputs, output) -> None:
    logits, target, *ctx.options, _ = inputs
    _, *rest = output
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, *rest)


def _differentiate(ctx, grad, *_):
    if grad is None:
        return (None,) * 6
    return cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


cross_entropy.register_autograd(_differentiate, setup_context=_keep)


@custom_op("forge::cross_entropy_with_gradient", mutates_args=("gradient",))
def cross_entropy_with_gradient(
    logits: Tensor, gradient: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, mean: bool
) -> Tensor:
    """Return the loss; write its gradient to `gradient`, which may be `logits`. Both have contiguous columns."""
    target = target.contiguous()
    with device_of(logits):
        scale = count_targets(target, ignore, mean)
        return total_loss(losses_with_gradient(logits, gradient, target, scale, ignore, smoothing, z_loss), scale)


@cross_entropy_with_gradient.register_fake
def _(
    logits: Tensor, gradient: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, mean: bool
) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


class CrossEntropy(torch.autograd.Function):
    """Computes the gradient of the logits in forward; backward multiplies it by the gradient of the loss."""

    @staticmethod
    def forward(ctx, logits, target, ignore, smoothing, z_loss, mean, in_place):
        values = row_major(logits)
        apart = values.stride(0) >= values.shape[1]  # a gradient cannot be written to overlapping rows
        gradient = values if apart and (in_place or values is not logits) else torch.empty_like(values.contiguous())
        loss = cross_entropy_with_gradient(values, gradient, target, ignore, smoothing, z_loss, mean)
        ctx.save_for_backward(gradient.detach())
        return loss

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative("cross_entropy")
        (gradient,) = ctx.saved_tensors
        return times(gradient, grads[0]), None, None, None, None, None, None
