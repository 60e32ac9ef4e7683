"""Fast operators behind one contract: Triton on a GPU, plain torch elsewhere.

::

    from forge import kernels

    loss = kernels.linear_cross_entropy(hidden, head.weight, target)

Each name loads on first use. :mod:`forge_kernels.contract` defines what a kernel guarantees, `forge kernels` lists the
installed ones, and the plugin `kernels` swaps them into a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_kernels.ops.attention import attention
    from forge_kernels.ops.cpp import all_finite
    from forge_kernels.ops.cross_entropy import cross_entropy
    from forge_kernels.ops.linear_cross_entropy import linear_cross_entropy
    from forge_kernels.ops.matmul import matmul
    from forge_kernels.ops.mlp import mlp
    from forge_kernels.ops.norms import layer_norm, rms_norm
    from forge_kernels.ops.softmax import softmax

_HOME = {
    "all_finite": "cpp",
    "attention": "attention",
    "cross_entropy": "cross_entropy",
    "layer_norm": "norms",
    "linear_cross_entropy": "linear_cross_entropy",
    "matmul": "matmul",
    "mlp": "mlp",
    "rms_norm": "norms",
    "softmax": "softmax",
}

__all__ = [
    "all_finite",
    "attention",
    "cross_entropy",
    "layer_norm",
    "linear_cross_entropy",
    "matmul",
    "mlp",
    "rms_norm",
    "softmax",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge.kernels' has no attribute {name!r}")
    value = getattr(import_module(f"forge_kernels.ops.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
