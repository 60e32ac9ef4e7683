"""Attention over a sequence that ranks divide: keys and values pass round a ring, by torch's own algorithm.

torch's `context_parallel` has handlers for CUDA's kernels alone. Here its ring runs around the kernel of the device: on
the CPU that of flash attention, on CUDA flash attention for short types and the memory-efficient kernel for float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from forge.errors import StackError
from forge.torch_internals import attention_efficient, attention_flash
from forge_cluster.torch_internals import (
    RotateMethod,
    efficient_backward,
    flash_backward,
    flash_on_cpu,
    flash_on_cpu_backward,
    ring_attention,
    ring_attention_backward,
    ring_options,
)

SLICE_BY_SLICE = RotateMethod.ALL_TO_ALL
"""How keys and values travel. torch can also gather all slices at once, which takes more memory and is not safe over
gloo. The two threads of a gloo group write the name of what they finished last into one string, without a lock (as of
torch 2.15). The name of the gather is too long to lie inside of the string. So when a gather ends together with any
other message of the group, memory is written after it was freed, or freed twice: "malloc(): unaligned tcache chunk
detected". The name of what passes a slice is short."""
SHORT = (torch.bfloat16, torch.float16)
ROWS = 32


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks that divide a sequence."""

    group: Any
    balance: bool
    "Whether each rank has a slice of the head and one of the tail."

    @contextmanager
    def options(self, dtype: torch.dtype, causal: bool) -> Iterator[None]:
        """Set torch's options of its ring, which are those of the process."""
        own = ring_options
        before = own.convert_to_f32, own.enable_load_balance, own.rotate_method
        own.convert_to_f32 = dtype in SHORT  # partial sums; float64 would be rounded
        own.enable_load_balance = self.balance and causal
        own.rotate_method = SLICE_BY_SLICE
        try:
            yield
        finally:
            own.convert_to_f32, own.enable_load_balance, own.rotate_method = before

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        """Return the attention of this rank's queries over the keys of all ranks; tensors as
        `scaled_dot_product_attention` takes them."""
        kind = query.device.type
        casts = torch.is_autocast_enabled(kind)
        if casts:
            short = torch.get_autocast_dtype(kind)
            query, key, value = query.to(short), key.to(short), value.to(short)
        shape = query.shape
        if key.dim() > 2 and key.shape[-3] != query.shape[-3]:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        query, key, value = (_in_four_dimensions(tensor) for tensor in (query, key, value))
        with torch.autocast(kind, enabled=False) if casts else nullcontext():
            out: Any = RingAttention.apply(query, key, value, self, causal, scale)
        return out.view(*shape[:-1], out.shape[-1])


class RingAttention(torch.autograd.Function):
    """torch's ring, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, causal: bool, scale: float | None
    ) -> Tensor:
        kernel = _kernel(query)
        with ring.options(query.dtype, causal):
            out, lse, *rest = ring_attention(
                ring.group, 2, kernel.forward, query, key, value, is_causal=causal, scale=scale, **kernel.given
            )
        ctx.ring, ctx.causal, ctx.kernel, ctx.scale = ring, causal, kernel, scale
        ctx.rest = rest
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        with ctx.ring.options(query.dtype, ctx.causal):
            found = ring_attention_backward(
                ctx.ring.group,
                2,
                ctx.kernel.backward,
                grads[0].contiguous(),
                ctx.kernel.gradient,
                query,
                key,
                value,
                out,
                lse,
                ctx.causal,
                scale=ctx.scale,
                **ctx.kernel.kept(ctx.rest),
            )
        return (*found[:3], None, None, None)


class OnCPU:
    """Flash attention of the CPU; float64 too."""

    gradient = "grad_out"
    given: dict[str, Any] = {}

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Any:
        return flash_on_cpu(query, key, value, 0.0, is_causal, scale=scale)

    @staticmethod
    def backward(is_causal: bool, scale: float | None, **tensors: Tensor) -> Any:
        return flash_on_cpu_backward(**tensors, dropout_p=0.0, is_causal=is_causal, scale=scale)

    @staticmethod
    def kept(rest: list[Any]) -> dict[str, Any]:
        return {}


class FlashOnCUDA:
    """torch's choice of kernel and arguments for short types, as in its own handlers."""

    gradient = "grad_out"
    given: dict[str, Any] = {"dropout_p": 0.0}
    forward = attention_flash
    backward = flash_backward

    @staticmethod
    def kept(rest: list[Any]) -> dict[str, Any]:
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        return {"dropout_p": 0.0, **dict(zip(names, rest, strict=False))}


class EfficientOnCUDA:
    """Memory-efficient attention for float32. Its sums of exponents are padded to rows of 32, which the ring cannot
    merge where a slice is shorter: they are cut after the kernel, and padded before its backward pass."""

    gradient = "grad_out_"
    given: dict[str, Any] = {}

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Any:
        out, lse, *rest = attention_efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)
        return out, lse[:, :, : query.shape[2]], *rest

    @staticmethod
    def backward(logsumexp: Tensor, **others: Any) -> Any:
        padded = pad(logsumexp, (0, -logsumexp.shape[2] % ROWS), value=torch.inf)
        return efficient_backward(logsumexp=padded, **others)

    @staticmethod
    def kept(rest: list[Any]) -> dict[str, Any]:
        seed, offset = rest
        mask = [True, True, True, False]
        return {
            "attn_bias": None,
            "philox_seed": seed,
            "philox_offset": offset,
            "dropout_p": 0.0,
            "grad_input_mask": mask,
        }


def _kernel(query: Tensor) -> Any:
    if query.is_cpu:
        return OnCPU
    if query.is_cuda and query.dtype is not torch.float64:
        return FlashOnCUDA if query.dtype in SHORT else EfficientOnCUDA
    raise StackError(
        f"context_parallel: there is no kernel for attention in {query.dtype} on {query.device.type}. Use the CPU, or "
        "CUDA with float32, bf16 or fp16."
    )


def _in_four_dimensions(tensor: Tensor) -> Tensor:
    """Return (batch, heads, length, width); the ring needs all four."""
    if tensor.dim() == 4:
        return tensor
    return tensor.reshape(-1, 1, *tensor.shape[-2:])
