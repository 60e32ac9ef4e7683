"""torch's compiler: whether it is there, before training needs it, and its switches during a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from forge import torch_internals as torchs
from forge.errors import RecipeError, StackError, did_you_mean
from forge_plugins import torch_internals as internals

SOURCE = "torch._dynamo.variables.tensor"
"""The logger of torch's message about a graph break; a filter sees only records of its own logger."""
NOISE = "Graph break from `Tensor.item()`"
LOOKS = (2, 15)
"""The first version of torch known to notice a changed `requires_grad` of a parameter."""
INSTEAD = "Or compile without generating code: compile.backend=aot_eager (for tests: it is no faster than eager)."


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse an unknown backend, and inductor without a compiler."""
    known = torch.compiler.list_backends(exclude_tags=()) if backend != "inductor" else [backend]
    if backend not in known:
        raise RecipeError(f"compile.backend is {backend!r}, which torch does not know.{did_you_mean(backend, known)}")
    if backend == "inductor" and device.type == "cpu":
        try:
            internals.find_cpp_compiler()
        except internals.InvalidCxxCompiler as error:
            raise StackError(
                "compile: on the CPU inductor needs a C++ compiler, and none was found. Install g++ (apt install g++, "
                f"dnf install gcc-c++), or name one with CXX=/path/to/compiler. {INSTEAD}"
            ) from error
    if backend == "inductor" and device.type == "cuda" and not internals.has_triton():
        raise StackError(
            "compile: on CUDA inductor needs triton, and a GPU of compute capability 7.0 or more; one is missing. "
            f"Install triton. {INSTEAD}"
        )


def checking_parameters() -> AbstractContextManager[Any]:
    """Make code compiled inside the `with` check its parameters in every call.

    Earlier versions of torch assume that a parameter is as it was at compile time: one that was frozen then, and thawed
    since, would silently get no gradient (pytorch/pytorch#139476).
    """
    numbers = tuple(int(part) for part in torch.__version__.split(".")[:2])
    flag = "skip_tensor_guards_with_matching_dict_tags"
    if numbers >= LOOKS or not hasattr(torchs.dynamo_config, flag):
        return nullcontext()
    return torchs.dynamo_config.patch({flag: False})


@contextmanager
def without_torchs_account() -> Iterator[None]:
    """Suppress torch's message that `.item()` broke a graph, unless TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return

    def quiet(record: logging.LogRecord) -> bool:  # one for each run, so that removing it keeps another run's
        return not str(record.msg).lstrip().startswith(NOISE)

    source = logging.getLogger(SOURCE)
    source.addFilter(quiet)
    try:
        yield
    finally:
        source.removeFilter(quiet)


@contextmanager
def without_breaks_for_messages() -> Iterator[None]:
    """Compile across `warning_once` of transformers, which would break the graph between a head and its loss.

    Compiled code does not show such a warning.
    """
    ignored: Any = getattr(torchs.dynamo_config, "ignore_logging_functions", None)
    once: Any = getattr(sys.modules.get("transformers.utils.logging"), "warning_once", None)
    if isinstance(ignored, set) and once is not None:
        with torchs.dynamo_config.patch(ignore_logging_functions=_Ignored((*ignored, once))):
            yield
    else:
        yield


class _Ignored(set[Any]):
    """Functions that the compiler skips; a copy holds their names, for torch 2.11 writes a copy as JSON."""

    def __deepcopy__(self, memo: dict[int, Any]) -> set[str]:
        return {getattr(function, "__qualname__", repr(function)) for function in self}
