"""Liger's kernels with the arguments of forge's, for comparison: github.com/linkedin/Liger-Kernel, 0.8.

Nothing here is used in training; the package `liger-kernel` need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def adapted(name: str) -> Callable[..., Any] | str:
    """Return Liger's function for one of forge's kernels, or why it cannot be used."""
    try:
        functional = import_module("liger_kernel.transformers.functional")
    except Exception as error:  # any of its dependencies may be broken
        first = (str(error).splitlines() or [""])[0]
        return f"liger-kernel cannot be imported: {type(error).__name__}: {first}"
    return ADAPTERS[name](functional)


def _softmax(liger: Any) -> Callable[..., Any]:
    return lambda x: liger.liger_softmax(x)


def _swiglu(liger: Any) -> Callable[..., Any]:
    return lambda gate, up: liger.liger_swiglu(gate, up)


def _geglu(liger: Any) -> Callable[..., Any]:
    return lambda gate, up: liger.liger_geglu(gate, up)


def _rms_norm(liger: Any) -> Callable[..., Any]:
    # in place it would overwrite the output gradient that all passes share
    return lambda x, weight, eps=1e-6: liger.liger_rms_norm(x, weight, eps, 0.0, "llama", False)


def _layer_norm(liger: Any) -> Callable[..., Any]:
    return lambda x, weight, bias, eps=1e-5: liger.liger_layer_norm(x, weight, bias, eps)


def _rope(liger: Any) -> Callable[..., Any]:
    def run(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        # it takes tables with a batch dimension, and rotates contiguous q and k in place
        return liger.liger_rope(q, k, cos.view(-1, *cos.shape[-2:]), sin.view(-1, *sin.shape[-2:]))

    return run


def _cross_entropy(liger: Any) -> Callable[..., Any]:
    def run(
        logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Any:
        return liger.liger_cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, lse_square_scale=z_loss
        )

    return run


def _linear_cross_entropy(liger: Any) -> Callable[..., Any]:
    def run(
        hidden: Any,
        weight: Any,
        target: Any,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Any:
        return liger.liger_fused_linear_cross_entropy(
            hidden, weight, target, ignore_index=ignore_index, label_smoothing=label_smoothing, lse_square_scale=z_loss
        )

    return run


ADAPTERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "cross_entropy": _cross_entropy,
    "geglu": _geglu,
    "layer_norm": _layer_norm,
    "linear_cross_entropy": _linear_cross_entropy,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "softmax": _softmax,
    "swiglu": _swiglu,
}
"""By kernel name: given Liger's module, its equivalent function."""
