"""Gated linear units: out = act(gate) · up, and its backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

BLOCK = 1024


@triton.jit
def _activation(x, kind: tl.constexpr):
    """act(x) and its derivative, in float32."""
    if kind == 0:  # SiLU
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid * (1 + x * (1 - sigmoid))
    else:  # GELU, tanh form
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        value = 0.5 * x * (1 + tanh)
        slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
    return value, slope


@triton.jit
def _forward(gate, up, out, count, kind: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0).to(tl.float32)
    value, _ = _activation(g, kind)
    tl.store(out + at, value * u, mask=inside)


@triton.jit
def _backward(grad, gate, up, grad_gate, grad_up, count, kind: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0).to(tl.float32)
    value, slope = _activation(g, kind)
    tl.store(grad_gate + at, d * u * slope, mask=inside)
    tl.store(grad_up + at, d * value, mask=inside)


@custom_op("forge::glu", mutates_args=())
def glu(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _forward[grid](gate, up, out, out.numel(), kind, BLOCK)
    return out


@glu.register_fake
def _(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@custom_op("forge::glu_backward", mutates_args=())
def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if grad.numel():
        grid = (triton.cdiv(grad.numel(), BLOCK),)
        _backward[grid](grad, gate, up, grad_gate, grad_up, grad.numel(), kind, BLOCK)
    return grad_gate, grad_up


@glu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    new = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return new, torch.empty_like(new)


def _keep(ctx, inputs, output) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, grad):
    gate, up = ctx.saved_tensors
    return *glu_backward(grad, gate, up, ctx.kind), None


glu.register_autograd(_differentiate, setup_context=_keep)
