"""The private names of torch that forge_speed uses; `forge.torch_internals` says how they are found."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from forge.torch_internals import Internal, resolve

NAMES = {
    "scaled_mm": Internal("torch._scaled_mm", "multiply matrices of 8-bit floats", "The plugin fp8 does not work."),
}


def __getattr__(name: str) -> Any:
    return resolve(name, NAMES, globals())


def stop_compilers() -> None:
    """End the processes in which torch compiles: they would go on, and slow down the next trials. Where torch has no
    such function, they do."""
    pool = sys.modules.get("torch._inductor.async_compile")  # importing it would start them
    with suppress(Exception):  # torch starts them again when it needs them
        if pool is not None:
            pool.shutdown_compile_workers()
