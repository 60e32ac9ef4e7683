"""Checks for kernels, forge's own and third parties'.

::

    from forge.testing import check_against_reference, check_compiles_whole

    def test_softsign_keeps_its_promises():
        x = torch.randn(33, 7, requires_grad=True)
        check_against_reference(SOFTSIGN, [x])
        check_compiles_whole(SOFTSIGN, [x])

Without a CUDA device Triton's kernels run in its interpreter, if TRITON_INTERPRET is 1 in the environment before Triton
is imported (in pytest: at the top of conftest.py). It is slow, so keep shapes small, and it has bugs, so call
`mend_interpreter()` there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forge_kernels.contract import Kernel

PERTURBATIONS = 4
"""Number of perturbations of the arguments by one rounding, to measure how far the exact result moves."""


def check_against_reference(kernel: Kernel, args: Sequence[Any], options: Mapping[str, Any] | None = None) -> None:
    """Raise AssertionError unless outputs and gradients are within the kernel's tolerance of the float64 reference.

    The tolerance is that of the least precise dtype among the arguments and the result. It holds for many entries: the
    errors of few do not average out, and a single entry may be off by three times as much. Where terms
    cancel, no tolerance holds for every input: a result may additionally be off by the reference's own error in the
    same dtypes, or by the change of the exact result when the arguments change by one rounding. Results that are not
    floating-point must be equal. All arguments that require a gradient are checked. Outputs must have the reference's
    dtypes for the same arguments. New memory is filled with NaN meanwhile. Unsupported arguments are an error too: the
    reference would be compared with itself.
    """
    options = options or {}
    assert kernel.supports(*args, **options) is None, "unsupported arguments: the reference would test itself"
    with torch.no_grad():
        dtypes = [output.dtype for output in outputs_of(kernel.reference, as_new_leaves(args), options)]
    exact = run(kernel.reference, in_float64(args), options, dtypes)
    with poisoned_memory():
        results = run(kernel.function, args, options)
    found = [result.dtype for result in results[: len(dtypes)]]
    assert found == dtypes, f"{kernel.name}: outputs are {found}, the reference gives {dtypes}"
    assert len(results) == len(exact)
    for place, (result, right) in enumerate(zip(results, exact, strict=True)):
        if not result.is_floating_point():
            assert torch.equal(result, right.to(result.dtype)), f"{kernel.name}: result {place} is not the reference's"
            continue
        few = 1 + 2 / max(1, result.numel()) ** 0.5
        bound = few * tolerance_of(kernel, args, result)
        off = distance(result, right)
        if off > bound:
            same_dtypes = run(kernel.reference, as_new_leaves(args), options)
            moved = [run(kernel.reference, perturbed(args, seed), options, dtypes) for seed in range(PERTURBATIONS)]
            bound += max(distance(other[place], right) for other in (same_dtypes, *moved))
        assert off <= bound, f"{kernel.name}: result {place} is off by {off:.2e}, more than {bound:.0e}"


def check_compiles_whole(kernel: Kernel, args: Sequence[Any], options: Mapping[str, Any] | None = None) -> None:
    """Raise an error unless torch.compile compiles the function without a graph break, forward and backward, with the
    same results."""
    options = options or {}
    expected = run(kernel.function, args, options)
    torch.compiler.reset()
    compiled = torch.compile(kernel.function, fullgraph=True, backend="aot_eager")
    results = run(compiled, args, options)
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, equal_nan=True)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN meanwhile, to reveal entries that are never written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


# -- helpers ---------------------------------------------------------------------------------------------------------


def run(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    rounded: Sequence[torch.dtype] | None = None,
) -> list[Tensor]:
    """Return outputs, then gradients of all inputs that require one, for a fixed random gradient of the outputs.

    That gradient is rounded to the dtypes `rounded`, if given, for outputs of a wider dtype.
    """
    outputs = outputs_of(function, args, options)
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if not wanted:
        return [o.detach() for o in outputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        grads = [
            torch.randn(o.shape, dtype=torch.float64).to(coarse).to(o.device, o.dtype)
            for o, coarse in zip(outputs, rounded or [o.dtype for o in outputs], strict=True)
        ]
    gradients = torch.autograd.grad(outputs, wanted, grads)
    return [o.detach() for o in outputs] + list(gradients)


def outputs_of(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> list[Tensor]:
    """Call a function and return its outputs as a list."""
    output = function(*args, **options)
    return list(output) if isinstance(output, (tuple, list)) else [output]


def as_new_leaves(args: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Copy the arguments into new leaves, floating-point tensors in `dtype` if given.

    The copies are contiguous: some of torch's functions refuse unaligned tensors.
    """

    def copy(a: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and a.is_floating_point() else a.dtype
        new = a.detach().to(wanted, memory_format=torch.contiguous_format, copy=True)
        return new.requires_grad_(a.requires_grad)

    return [copy(a) if isinstance(a, Tensor) else a for a in args]


def in_float64(args: Sequence[Any]) -> list[Any]:
    """Copy the arguments into new leaves, floating-point tensors in float64."""
    return as_new_leaves(args, torch.float64)


def perturbed(args: Sequence[Any], seed: int) -> list[Any]:
    """Copy the arguments in float64, every floating-point entry moved up or down by one rounding of its dtype."""
    drawn = torch.Generator().manual_seed(seed)

    def perturb(a: Tensor) -> Tensor:
        if not a.is_floating_point():
            return a
        sign = torch.randint(0, 2, a.shape, generator=drawn).to(a.device) * 2 - 1
        wide = a.detach().to(torch.float64, memory_format=torch.contiguous_format)
        return (wide * (1 + torch.finfo(a.dtype).eps * sign)).requires_grad_(a.requires_grad)

    return [perturb(a) if isinstance(a, Tensor) else a for a in args]


def tolerance_of(kernel: Kernel, args: Sequence[Any], result: Tensor) -> float:
    """Return the tolerance of the least precise dtype among the result and the arguments."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    dtypes = {tensor.dtype for tensor in (*tensors, result)}
    missing = [str(dtype) for dtype in dtypes if dtype not in kernel.tolerance]
    assert not missing, f"{kernel.name} has no tolerance for {missing[0]}"
    return max(kernel.tolerance[dtype] for dtype in dtypes)


def distance(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of the exact values; infinite and NaN entries must agree.

    Differences below the dtype's smallest normal number count as 0.
    """
    tiny = torch.finfo(result.dtype).tiny
    result, exact = result.double(), exact.double()
    assert result.shape == exact.shape, (result.shape, exact.shape)
    odd = ~torch.isfinite(exact)
    torch.testing.assert_close(result[odd], exact[odd], equal_nan=True)
    assert torch.isfinite(result[~odd]).all(), "entries that should be finite are not"
    difference = (result[~odd] - exact[~odd]).abs().sub(tiny).clamp(min=0)
    return float(difference.norm() / exact[~odd].norm().clamp(min=tiny))


# -- Triton's interpreter ---------------------------------------------------------------------------------------------

_mended: list[Any] = []


def mend_interpreter() -> None:
    """Fix two bugs of Triton's interpreter, once per process: loop bounds known at run time (in 3.6 NumPy 2.4 refuses
    them), and products of bfloat16 matrices (it multiplies their bits as integers)."""
    from triton import language as tl
    from triton.runtime import interpreter

    if _mended:
        return
    patch: Any = interpreter._patch_lang_tensor
    builder: Any = interpreter.InterpreterBuilder
    create_dot: Any = builder.create_dot
    _mended.extend([patch, create_dot])

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
