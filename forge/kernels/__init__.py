"""Fast operators behind one contract: Triton on a GPU, plain torch elsewhere.

::

    from forge import kernels

    loss = kernels.linear_cross_entropy(hidden, head.weight, target)

Each name loads on first use. :mod:`forge.kernels.contract` says what a kernel promises, `forge kernels` lists what is
installed, and the plugin `kernels` swaps them into a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "geglu": "glu",
    "swiglu": "glu",
}

__all__ = ["geglu", "swiglu"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge.kernels' has no attribute {name!r}")
    value = getattr(import_module(f"forge.kernels.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
