"""Matrix product with bias and activation, and its backward: torch's own products, and one pass over the gradient for
activation and bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of, refuse_second_derivative
from forge_kernels.triton.activations import activate
from forge_kernels.triton.product import product

CHUNK = 128
"""Rows that one program sums."""


@triton.jit
def _slopes(grad, pre, out, sums, M, N, KIND: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)  # rows are on axis 0: other axes are limited to 65,535
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, CHUNK, BM):
        rows = chunk * CHUNK + start + tl.arange(0, BM)
        at = rows[:, None] * N + columns[None, :]
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        _, slope = activate(tl.load(pre + at, mask=inside, other=0).to(tl.float32), KIND)
        g = tl.load(grad + at, mask=inside, other=0).to(tl.float32) * slope
        tl.store(out + at, g, mask=inside)
        total += g
    tl.store(sums + chunk * N + columns, tl.sum(total, 0), mask=columns < N)


def matrix(x: Tensor) -> Tensor:
    """View x as a matrix, with all but its last dimension flattened."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


@custom_op("forge::matmul", mutates_args=())
def matmul(a: Tensor, b: Tensor, bias: Tensor | None, kind: str, keep: bool) -> tuple[Tensor, Tensor]:
    """Return activation(a @ b + bias), and with `keep` the activation's input, for the backward."""
    out, pre, _ = product(matrix(a), b, bias, kind, "keep" if keep else "value")
    shape = (*a.shape[:-1], b.shape[1])
    return out.view(shape), a.new_empty(0) if pre is None else pre.view(shape)


@matmul.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, kind: str, keep: bool) -> tuple[Tensor, Tensor]:
    out = a.new_empty((*a.shape[:-1], b.shape[1]))
    return out, torch.empty_like(out) if keep else a.new_empty(0)


@custom_op("forge::activation_grad", mutates_args=())
def activation_grad(grad: Tensor, pre: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return grad · activation'(pre), and its sums over all but the last dimension, in float32."""
    M, N = matrix(grad).shape
    grad, pre = grad.contiguous(), pre.contiguous()
    out = torch.empty_like(grad)
    sums = grad.new_empty(triton.cdiv(M, CHUNK), N, dtype=torch.float32)
    if out.numel():
        grid = (triton.cdiv(M, CHUNK), triton.cdiv(N, 128))
        with device_of(grad):
            _slopes[grid](grad, pre, out, sums, M, N, kind, CHUNK, 32, 128, num_warps=4)
    return out, sums.sum(0)


@activation_grad.register_fake
def _(grad: Tensor, pre: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[-1], dtype=torch.float32)


def _keep(ctx, inputs, output) -> None:
    a, b, bias, ctx.kind, _ = inputs
    ctx.set_materialize_grads(False)  # the kept output has no gradient
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(a, b, output[1])


def _differentiate(ctx, grad, _):
    if grad is None:
        return None, None, None, None, None
    a, b, pre = ctx.saved_tensors
    wants_a, wants_b, wants_bias, *_ = ctx.needs_input_grad
    if ctx.kind != "none":
        refuse_second_derivative("matmul")
        grad, sums = activation_grad(grad, pre, ctx.kind)
        grad_bias = sums.to(ctx.bias_dtype) if wants_bias else None
    else:
        grad_bias = matrix(grad).sum(0) if wants_bias else None
    grad_a = grad @ b.t() if wants_a else None
    grad_b = _weight_grad(a, b, grad) if wants_b else None
    return grad_a, grad_b, grad_bias, None, None


def _weight_grad(a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of b in a @ b, in b's memory order."""
    a, grad = matrix(a), matrix(grad)
    return (grad.t() @ a).t() if b.stride(0) == 1 else a.t() @ grad


matmul.register_autograd(_differentiate, setup_context=_keep)
