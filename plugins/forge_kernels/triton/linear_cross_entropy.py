"""A linear head and its cross-entropy over chunks of tokens; the gradient of a chunk overwrites its logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of, refuse_second_derivative
from forge_kernels.triton.cross_entropy import scale_of, times
from forge_kernels.triton.cross_entropy_rows import losses_with_gradient


@custom_op("forge::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore: int,
    smoothing: float,
    mean: bool,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and the gradients of hidden, weight and bias, empty if not wanted."""
    hidden, target = hidden.contiguous(), target.contiguous()
    matrix = weight.to(hidden.dtype)  # cast a float32 weight under autocast once, not per chunk
    offset = None if bias is None else bias.to(hidden.dtype)
    grads = _gradients(hidden, weight, bias, wanted)
    losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    buffer = hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])
    with device_of(hidden), torch.autocast(hidden.device.type, enabled=False):
        scale = scale_of(target, ignore, mean)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], matrix, offset, buffer)
            losses[rows] = losses_with_gradient(logits, logits, target[rows], scale, ignore, smoothing)
            _accumulate(logits, hidden, matrix, rows, grads, wanted)
        return losses.sum() * scale, *grads


def _logits(hidden: Tensor, matrix: Tensor, offset: Tensor | None, buffer: Tensor) -> Tensor:
    out = buffer[: hidden.shape[0]]
    if offset is None:
        return torch.mm(hidden, matrix.t(), out=out)
    return torch.addmm(offset, hidden, matrix.t(), out=out)


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    # each chunk of hidden is written once, and the first chunk writes all of weight's gradient
    grad_hidden = hidden.new_empty(hidden.shape if wanted[0] else 0)
    grad_weight = (weight.new_empty if hidden.shape[0] else weight.new_zeros)(weight.shape if wanted[1] else 0)
    grad_bias = hidden.new_zeros(
        weight.shape[0] if wanted[2] else 0, dtype=torch.float32 if bias is None else bias.dtype
    )
    return grad_hidden, grad_weight, grad_bias


def _accumulate(
    gradient: Tensor,
    hidden: Tensor,
    matrix: Tensor,
    rows: slice,
    grads: tuple[Tensor, Tensor, Tensor],
    wanted: list[bool],
) -> None:
    grad_hidden, grad_weight, grad_bias = grads
    if wanted[0]:
        torch.mm(gradient, matrix, out=grad_hidden[rows])
    if wanted[1]:
        _add_product(grad_weight, gradient.t(), hidden[rows], beta=0 if rows.start == 0 else 1)
    if wanted[2]:
        grad_bias += gradient.sum(0, dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    """Compute total = beta · total + left @ right in place, added in float32 and rounded once, for any dtypes."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta)


@linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore: int,
    smoothing: float,
    mean: bool,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return hidden.new_empty((), dtype=torch.float32), *_gradients(hidden, weight, bias, wanted)


def _keep(ctx, inputs, output) -> None:
    _, *grads = output
    ctx.wanted = inputs[-1]
    ctx.mark_non_differentiable(*grads)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*grads)


def _differentiate(ctx, grad, *_):
    refuse_second_derivative("linear_cross_entropy")
    nothing = (None,) * 6
    if grad is None:
        return None, None, None, *nothing
    scaled = [times(g, grad) if wanted else None for g, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)]
    return *scaled, *nothing


linear_cross_entropy.register_autograd(_differentiate, setup_context=_keep)
