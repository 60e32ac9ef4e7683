"""Check before training that the compiler is installed; it would fail only in the first update."""

from __future__ import annotations

import torch

from forge.errors import RecipeError, StackError, did_you_mean
from forge_plugins import torch_internals as internals

INSTEAD = "Or compile without generating code: compile.backend=aot_eager (for tests: it is no faster than eager)."


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse an unknown backend, and inductor without a compiler."""
    if backend != "inductor":
        _check_name(backend)
    elif device.type == "cpu":
        _check_cpp()
    elif device.type == "cuda":
        _check_triton()


def _check_name(backend: str) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise RecipeError(f"compile.backend is {backend!r}, which torch does not know.{did_you_mean(backend, known)}")


def _check_cpp() -> None:
    try:
        internals.find_cpp_compiler()
    except internals.InvalidCxxCompiler as error:
        raise StackError(
            f"compile: on the CPU inductor needs a C++ compiler, and none was found. Install g++ (apt install g++, dnf "
            f"install gcc-c++), or name one with CXX=/path/to/compiler. {INSTEAD}"
        ) from error


def _check_triton() -> None:
    if not internals.has_triton():
        raise StackError(
            "compile: on CUDA inductor needs triton, and a GPU of compute capability 7.0 or more; one is missing. "
            f"Install triton. {INSTEAD}"
        )
