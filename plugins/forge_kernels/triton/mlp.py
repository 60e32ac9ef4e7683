"""Two linear layers with an activation between them, with no pass over the hidden tensor except the matrix products.

The first product writes both the activation's input and its value. In the backward, the product that computes the
gradient of that value also applies the activation's gradient and sums for the bias.

It is two autograd steps, so that tensors saved by the second are freed before the backward of the first. The first
returns `pre` and `hidden` = activation(pre); gradients flow through `pre` only, and once: the second treats `hidden` as
a constant. The second also returns the gradient of the first's bias, since it has the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import refuse_second_derivative
from forge_kernels.triton.matmul import matrix
from forge_kernels.triton.product import product


@custom_op("forge::mlp_first", mutates_args=())
def first(x: Tensor, w1: Tensor, b1: Tensor | None, kind: str, keep: bool) -> tuple[Tensor, Tensor]:
    """Return with `keep` x @ w1ᵀ + b1 as a matrix, for the backward; and its activation."""
    hidden, pre, _ = product(matrix(x), w1.t(), b1, kind, "keep" if keep else "value")
    return x.new_empty(0) if pre is None else pre, hidden


@first.register_fake
def _(x: Tensor, w1: Tensor, b1: Tensor | None, kind: str, keep: bool) -> tuple[Tensor, Tensor]:
    hidden = x.new_empty(matrix(x).shape[0], w1.shape[0])
    return torch.empty_like(hidden) if keep else x.new_empty(0), hidden


@custom_op("forge::mlp_hidden_grad", mutates_args=())
def hidden_grad(grad: Tensor, w2: Tensor, pre: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return grad @ w2 · activation'(pre), and its column sums in float32."""
    out, _, sums = product(grad, w2, None, kind, "slope", pre)
    assert sums is not None
    return out, sums


@hidden_grad.register_fake
def _(grad: Tensor, w2: Tensor, pre: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(pre), pre.new_empty(pre.shape[1], dtype=torch.float32)


def _keep_first(ctx, inputs, output) -> None:
    x, w1, *_ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # `hidden` has no gradient
    ctx.save_for_backward(x, w1)


def _differentiate_first(ctx, grad, _):
    if grad is None:
        return None, None, None, None, None
    x, w1 = ctx.saved_tensors
    wants_x, wants_w1, *_ = ctx.needs_input_grad
    grad_x = (grad @ w1).view(x.shape) if wants_x else None
    grad_w1 = grad.t() @ matrix(x) if wants_w1 else None
    return grad_x, grad_w1, None, None, None


class Second(torch.autograd.Function):
    """hidden @ w2ᵀ + b2. Its forward is torch's own, so it is no custom operator, which would cost the host more."""

    @staticmethod
    def forward(ctx, pre, hidden, b1, w2, b2, kind):
        ctx.kind, ctx.b1_dtype = kind, None if b1 is None else b1.dtype
        ctx.save_for_backward(pre, hidden, w2)
        return hidden @ w2.t() if b2 is None else torch.addmm(b2, hidden, w2.t())

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative("mlp")
        pre, hidden, w2 = ctx.saved_tensors
        wants_pre, _, wants_b1, wants_w2, wants_b2, _ = ctx.needs_input_grad
        grad_w2 = grad.t() @ hidden if wants_w2 else None
        grad_b2 = grad.sum(0) if wants_b2 else None
        if not (wants_pre or wants_b1):
            return None, None, None, grad_w2, grad_b2, None
        grad_pre, sums = hidden_grad(grad, w2, pre, ctx.kind)
        grad_b1 = sums.to(ctx.b1_dtype) if wants_b1 else None
        return grad_pre, None, grad_b1, grad_w2, grad_b2, None


first.register_autograd(_differentiate_first, setup_context=_keep_first)
