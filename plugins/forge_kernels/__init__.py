"""Fast operators behind one contract: Triton on a GPU, plain torch elsewhere.

::

    from forge import kernels

    loss = kernels.linear_cross_entropy(hidden, head.weight, target)

Each name loads on first use: forge's own, and those that other packages register under the entry point
`forge.kernels`. :mod:`forge_kernels.contract` defines what a kernel guarantees, and the plugin `kernels` swaps them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge import registry

if TYPE_CHECKING:
    from forge_kernels.ops.attention import attention
    from forge_kernels.ops.cpp.finite import all_finite
    from forge_kernels.ops.cross_entropy import cross_entropy
    from forge_kernels.ops.linear_cross_entropy import linear_cross_entropy
    from forge_kernels.ops.matmul import matmul
    from forge_kernels.ops.mlp import mlp
    from forge_kernels.ops.norms import layer_norm, rms_norm
    from forge_kernels.ops.softmax import softmax

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
    if name.startswith("_") or name not in registry.installed("kernel"):
        raise AttributeError(f"module 'forge.kernels' has no attribute {name!r}")
    function = globals()[name] = registry.load("kernel", name).function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
