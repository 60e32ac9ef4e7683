"""What forge's own kernels are held to: that of :mod:`forge_kernels.testing`, and a little more.

Without a CUDA device kernels run in Triton's interpreter (conftest sets TRITON_INTERPRET), so keep shapes small there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.autograd import forward_ad

from forge_kernels.contract import INTERPRETED
from forge_kernels.testing import (
    check_against_reference,
    check_compiles_whole,
    distance,
    in_float64,
    mend_interpreter,
    poisoned_memory,
    run,
)
from tests.conftest import PROFILE

__all__ = [
    "DEVICE",
    "check_against_reference",
    "check_compiles_whole",
    "check_stand_in_compiles_whole",
    "check_transformed",
    "distance",
    "every_transform",
    "few",
    "in_float64",
    "poisoned_memory",
    "run",
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few = settings(max_examples=2 if PROFILE == "quick" else 500)
"""For tests that launch kernels for every example: the interpreter takes a tenth of a second."""


def check_stand_in_compiles_whole(stand_in: Callable[..., Any], *args: Any) -> None:
    """torch.compile takes a stand-in without a graph break, the kernel included, and under autocast too."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("the original was called")

    for autocast in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(partial(stand_in, never), fullgraph=True, backend="aot_eager")
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(compiled(*args), stand_in(never, *args))


def _func_grad(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor:
    return torch.func.grad(lambda x: (function(x) * tangent).sum())(x)


def _func_jvp(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor:
    return torch.func.jvp(function, (x,), (tangent,))[1]


def _dual_numbers(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


def _compiled_jvp(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(partial(_func_jvp, function), fullgraph=True, backend="aot_eager")(x, tangent)


TRANSFORMS = {
    "torch.func.grad": _func_grad,
    "torch.func.jvp": _func_jvp,
    "dual numbers": _dual_numbers,
    "torch.func.jvp compiled": _compiled_jvp,
}
every_transform = pytest.mark.parametrize(
    "transform",
    [  # compiling takes seconds for each kernel
        pytest.param(transform, id=name, marks=pytest.mark.slow if "compiled" in name else ())
        for name, transform in TRANSFORMS.items()
    ],
)
"""For tests of `check_transformed`."""


def check_transformed(
    transform: Callable[..., Tensor], function: Callable[[Tensor], Any], plainly: Callable[[Tensor], Any], x: Tensor
) -> None:
    """Transformed, a function that may run a kernel is what plain torch is: an error too, as from those of torch's own
    operators that have no forward mode."""
    tangent = torch.randn_like(x)
    try:
        right = transform(plainly, x, tangent)
    except Exception as error:  # of torch's many classes
        with pytest.raises(type(error)):
            transform(function, x, tangent)
        return
    torch.testing.assert_close(transform(function, x, tangent), right)


def _quicken_interpreter() -> None:
    """Triton's interpreter looks through its whole language at every launch and every call of a device function, which
    takes half of a small kernel's time. It need not while the language is patched, and finds the same every time.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    module: Any = interpreter
    patch_lang, patch_attr = module._patch_lang, module._patch_attr
    found: dict[Any, list[tuple[str, Any]]] = {}
    patched: set[ModuleType] = set()

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            found[package] = [(n, each) for n, each in inspect.getmembers(package) if tl.core.is_builtin(each)]
        for name, member in found[package]:
            patch_attr(package, name, member, builder, scope)

    @cache
    def languages(function: Any) -> set[ModuleType]:
        return {each for each in function.__globals__.values() if each is tl or each is tl.core}

    def patch(function: Any) -> Any:
        new = languages(function) - patched
        if languages(function) and not new:
            return module._LangPatchScope()
        scope = patch_lang(function)
        patched.update(new)
        restore = scope.restore

        def restored() -> None:
            patched.difference_update(new)
            restore()

        scope.restore = restored
        return scope

    module._patch_lang, module._patch_builtin = patch, patch_builtin


if INTERPRETED:
    mend_interpreter()
    _quicken_interpreter()
