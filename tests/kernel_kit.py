"""What every kernel is held to, whoever wrote it: see `hold` and its parts.

Without a CUDA device kernels run in Triton's interpreter (conftest sets TRITON_INTERPRET), so keep shapes small there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forge.kernels.contract import INTERPRETED, Kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> list[Tensor]:
    """Outputs, then the gradients of all inputs that require one, for a fixed random gradient of the outputs."""
    output = function(*args, **options)
    outputs = list(output) if isinstance(output, (tuple, list)) else [output]
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if not wanted:
        return [o.detach() for o in outputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        grads = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype).to(o.device) for o in outputs]
    gradients = torch.autograd.grad(outputs, wanted, grads)
    return [o.detach() for o in outputs] + list(gradients)


def in_float64(args: Sequence[Any]) -> list[Any]:
    """The same arguments with floating tensors in float64, as new leaves."""

    def widen(a: Any) -> Any:
        if isinstance(a, Tensor) and a.is_floating_point():
            return a.detach().double().requires_grad_(a.requires_grad)
        return a

    return [widen(a) for a in args]


def distance(result: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact values; infinite and NaN entries must be the same ones.

    What is smaller than the dtype's smallest normal number counts as 0.
    """
    tiny = torch.finfo(result.dtype).tiny
    result, exact = result.double(), exact.double()
    assert result.shape == exact.shape, (result.shape, exact.shape)
    odd = ~torch.isfinite(exact)
    torch.testing.assert_close(result[odd], exact[odd], equal_nan=True)
    assert torch.isfinite(result[~odd]).all(), "entries that should be finite are not"
    difference = (result[~odd] - exact[~odd]).abs().sub(tiny).clamp(min=0)
    return float(difference.norm() / exact[~odd].norm().clamp(min=tiny))


def check_against_reference(
    kernel: Kernel, args: Sequence[Any], options: Mapping[str, Any] | None = None, tolerance: float | None = None
) -> None:
    """Outputs and gradients are as near to the reference in float64 as the contract says, with poisoned memory."""
    options = options or {}
    dtype = next(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
    bound = kernel.tolerance[dtype] if tolerance is None else tolerance
    assert kernel.supports(*args, **options) is None, "the reference would run: this would test nothing"
    exact = run(kernel.reference, in_float64(args), options)
    with poisoned_memory():
        results = run(kernel.function, args, options)
    assert len(results) == len(exact)
    for place, (result, right) in enumerate(zip(results, exact, strict=True)):
        off = distance(result, right)
        assert off <= bound, f"{kernel.name}: result {place} is off by {off:.2e}, more than {bound:.0e}"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN meanwhile, so that an entry that is never written is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def check_compiles_whole(kernel: Kernel, args: Sequence[Any], options: Mapping[str, Any] | None = None) -> None:
    """torch.compile takes the function without a graph break, forward and backward, and computes the same."""
    options = options or {}
    expected = run(kernel.function, args, options)
    torch.compiler.reset()
    compiled = torch.compile(kernel.function, fullgraph=True, backend="aot_eager")
    results = run(compiled, args, options)
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, equal_nan=True)


def mend_interpreter() -> None:
    """Two things that Triton's interpreter gets wrong: loop bounds known at run time (in 3.6 NumPy 2.4 refuses them),
    and products of bfloat16 matrices (it multiplies their bits as integers)."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor
    builder: Any = interpreter.InterpreterBuilder
    create_dot: Any = builder.create_dot

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.view("uint16").astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, wide(a), wide(b), *rest)

    interpreter._patch_lang_tensor = mended
    builder.create_dot = dot


if INTERPRETED:
    mend_interpreter()
