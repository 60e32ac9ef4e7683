"""Matrix product with bias; its backward is torch's own products."""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from forge_kernels.triton.product import product


def matrix(x: Tensor) -> Tensor:
    """View x as a matrix, with all but its last dimension flattened."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


@custom_op("forge::matmul", mutates_args=())
def matmul(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    out, _, _ = product(matrix(a), b, bias, "none")
    return out.view(*a.shape[:-1], b.shape[1])


@matmul.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[1]))


def _keep(ctx, inputs, output) -> None:
    a, b, _ = inputs
    ctx.save_for_backward(a, b)


def _differentiate(ctx, grad):
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias = ctx.needs_input_grad
    grad_a = grad @ b.t() if wants_a else None
    grad_b = _weight_grad(a, b, grad) if wants_b else None
    return grad_a, grad_b, matrix(grad).sum(0) if wants_bias else None


def _weight_grad(a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of b in a @ b, in b's memory order."""
    a, grad = matrix(a), matrix(grad)
    return (grad.t() @ a).t() if b.stride(0) == 1 else a.t() @ grad


matmul.register_autograd(_differentiate, setup_context=_keep)
