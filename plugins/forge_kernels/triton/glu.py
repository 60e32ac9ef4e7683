"""Gated linear units: out = act(gate) · up, and its backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of
from forge_kernels.triton.activations import activate
from forge_kernels.triton.rows import as_rows

FORWARD, BACKWARD = (2048, 4), (1024, 4)
"""Entries and warps of a program."""


@triton.jit
def _forward(gate, up, out, width, blocks, gate_stride, up_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0).to(tl.float32)
    value, _ = activate(g, KIND)
    tl.store(out + row * width + column, value * u, mask=inside)


@triton.jit
def _backward(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    width,
    blocks,
    grad_stride,
    gate_stride,
    up_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # in reverse: the last writes are still in the cache
    row = (program // blocks).to(tl.int64)
    column = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    d = tl.load(grad + row * grad_stride + column, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0).to(tl.float32)
    value, slope = activate(g, KIND)
    tl.store(grad_gate + row * width + column, d * u * slope, mask=inside)
    tl.store(grad_up + row * width + column, d * value, mask=inside)


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """View as rows with gaps between them (halves of a wider tensor), or as one long row without gaps."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


@custom_op("forge::glu", mutates_args=())
def glu(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate, up = _as_rows(gate, up)
        rows, width = gate.shape
        block, warps = FORWARD
        blocks = triton.cdiv(width, block)
        with device_of(out):
            _forward[(rows * blocks,)](
                gate, up, out, width, blocks, gate.stride(0), up.stride(0), kind, block, num_warps=warps
            )
    return out


@glu.register_fake
def _(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@custom_op("forge::glu_backward", mutates_args=())
def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if grad.numel():
        grad, gate, up = _as_rows(grad, gate, up)
        rows, width = gate.shape
        block, warps = BACKWARD
        blocks = triton.cdiv(width, block)
        with device_of(gate):
            _backward[(rows * blocks,)](
                grad,
                gate,
                up,
                grad_gate,
                grad_up,
                width,
                blocks,
                grad.stride(0),
                gate.stride(0),
                up.stride(0),
                kind,
                block,
                num_warps=warps,
            )
    return grad_gate, grad_up


@glu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    new = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return new, torch.empty_like(new)


def _keep(ctx, inputs, output) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, grad):
    gate, up = ctx.saved_tensors
    return *glu_backward(grad, gate, up, ctx.kind), None


glu.register_autograd(_differentiate, setup_context=_keep)
