"""Run CUDA's choice of operations, and CUDA's autocast, on fake tensors of the host.

Fake tensors on CUDA would choose by themselves, but autograd cannot run backward over them without a GPU. Tensors on
the host choose the host's operations, and three of these differ in memory: dropout keeps a mask of floats where CUDA
keeps booleans, attention with dropout keeps its matrix where CUDA's kernels keep none, and autocast leaves softmax and
normalisations in the short type where CUDA computes them in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from forge.torch_internals import attention_efficient, attention_flash, attention_math, has_kernel, operator_names

aten = torch.ops.aten

SHORT = (torch.bfloat16, torch.float16)
FLASH_WIDTH = 256
"""The widest head that flash attention supports."""
IN_SHORT = """
    addmv addr chain_matmul convolution _convolution cudnn_convolution cudnn_convolution_transpose _cudnn_rnn einsum
    gru_cell linalg_multi_dot lstm_cell mv prelu rnn_relu_cell rnn_tanh_cell _scaled_dot_product_flash_attention
    _thnn_fused_gru_cell _thnn_fused_lstm_cell
"""
IN_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
NOT_IN_FLOAT = frozenset(f"{IN_SHORT} {IN_WIDEST}".split())
"""Operations that CUDA's autocast runs in the short type or in the widest input type, and not in float32."""


@contextmanager
def chosen_as_on_cuda() -> Iterator[None]:
    """Make the host choose operations as CUDA does."""
    library = Library("aten", "IMPL")
    try:
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        for name in _autocast_only_on("CUDA", "CPU"):
            if name.partition(".")[0] not in NOT_IN_FLOAT:
                library.impl(name, _in_float(name), "AutocastCPU")
        for name in _autocast_only_on("CPU", "CUDA"):  # CUDA casts their parts one by one, as for cross entropy
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()


def _autocast_only_on(one: str, other: str) -> list[str]:
    """Return the operations that autocast handles on one device and not on the other."""
    names = [name for name in operator_names() if name.startswith("aten::")]
    only = [name for name in names if has_kernel(name, f"Autocast{one}") and not has_kernel(name, f"Autocast{other}")]
    return [name.removeprefix("aten::") for name in only]


def _in_float(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(aten, packet), overload or "default")
    names = [argument.name for argument in operation._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if "dtype" in names:  # these convert as they compute; a requested type stays
                given = dict(zip(names, args, strict=False)) | kwargs
                if args[0].dtype in SHORT and given.get("dtype") is None:
                    given["dtype"] = torch.float32
                return operation(**given)
            return operation(*map(_as_float, args), **{key: _as_float(value) for key, value in kwargs.items()})

    return run


def _as_float(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_float, value))
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return input
    return aten.native_dropout(input, p, train)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Use flash attention for short types without a mask, else the memory-efficient kernel, else plain products."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if query.dim() != 4 or query.is_nested:
        return attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    if query.dtype in SHORT and attn_mask is None and query.size(-1) <= FLASH_WIDTH:
        return attention_flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return attention_efficient(query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale)[0]
