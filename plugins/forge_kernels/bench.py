"""Bench: a kernel's cases, timed forward and backward beside what else computes the same, and held to its promises.

`forge kernels bench` and `python -m benchmarks.kernels` are two faces of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from forge.errors import KernelError, did_you_mean
from forge_kernels import liger
from forge_kernels.contract import INTERPRETED, Case, Cost, Kernel, dtype_name
from forge_kernels.eager import eager
from forge_kernels.timing import Ceilings, Pass, Stopwatch, distance, measure_ceilings

FORGE, AGAINST = "forge", ("eager", "compile", "liger")
"""The kernel itself, and what it is compared with: torch's own function, its reference compiled, and Liger's kernel."""
SEED = 1234


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One contender on one case."""

    kernel: str
    case: str
    dtype: str
    contender: str
    ms: float | None = None
    "Forward and backward, the median; None where it did not run."
    ms_low: float | None = None
    ms_high: float | None = None
    "A fifth of the passes took less than the one, and a fifth more than the other."
    roofline: float | None = None
    "Share of what the device can do at best."
    error: float | None = None
    "The largest of all outputs and gradients: norm of the difference to the reference in float64 over its norm."
    tolerance: float | None = None
    "What the contract promises for it."
    peak_mb: float | None = None
    "Memory that one pass takes beside its inputs, at its peak."
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether a kernel is as exact as its contract says."""
        return self.error is None or self.tolerance is None or self.error <= self.tolerance


class Bench:
    """Measures on one device, whose ceilings it measures first."""

    def __init__(self, device: torch.device | None = None, against: Sequence[str] = AGAINST, quick: bool = False):
        self.device = bench_device() if device is None else device
        self.against = against
        self.stopwatch = Stopwatch(self.device, quick)
        self.ceilings: Ceilings = measure_ceilings(self.stopwatch)

    def describe(self) -> dict[str, Any]:
        """The device, its ceilings, and the versions that the figures are for."""
        return {
            "device": device_name(self.device),
            "copy_bytes_per_s": self.ceilings.bytes,
            "bf16_flops_per_s": self.ceilings.flops,
            "torch": torch.__version__,
            "triton": package_version("triton"),
            "liger": package_version("liger_kernel"),
        }

    def rows(self, kernel: Kernel, case: str | None = None, dtypes: Sequence[str] | None = None) -> Iterator[BenchRow]:
        """Every contender on every case, or on those whose name contains `case`, in each dtype."""
        for picked in _cases(kernel, case):
            for dtype in _dtypes(kernel, dtypes):
                yield from self._case_rows(kernel, picked, dtype)

    def _case_rows(self, kernel: Kernel, case: Case, dtype: torch.dtype) -> Iterator[BenchRow]:
        torch.manual_seed(SEED)
        args = case.make(self.device, dtype)
        head = kernel.name, case.name, dtype_name(dtype)
        reason = kernel.supports(*args, **case.options)
        if reason is not None:
            yield BenchRow(*head, FORGE, note=f"not supported: {reason}")
            return
        cost = kernel.cost(*args, **case.options)
        contenders = self._contenders(kernel)
        exact = Exact(kernel, args, case.options)
        for name, function in contenders.items():
            bound = kernel.tolerance.get(dtype) if name == FORGE else None
            try:
                if isinstance(function, str):
                    raise KernelError(function)
                yield self._measured(head, name, function, args, case.options, cost, exact, bound)
            except Exception as error:  # one contender that fails must not take the others' figures with it
                yield BenchRow(*head, name, note=_short(error))
            free()

    def _contenders(self, kernel: Kernel) -> dict[str, Callable[..., Any] | str]:
        """By name what runs, or why nothing can."""
        made: dict[str, Callable[..., Any] | str] = {FORGE: kernel.function}
        for name in self.against:
            if name == "eager":
                made[name] = eager(kernel)
            elif name == "compile":
                made[name] = _compiled(kernel.reference)
            elif kernel.name in liger.ADAPTERS:
                made[name] = liger.adapted(kernel.name)
        return made

    def _measured(
        self,
        head: tuple[str, str, str],
        name: str,
        function: Callable[..., Any],
        given: Sequence[Any],
        options: Mapping[str, Any],
        cost: Cost,
        exact: Exact,
        bound: float | None,
    ) -> BenchRow:
        work = Pass(function, copied(given), options)
        off = exact.off(work)
        work = Pass(function, copied(given), options)  # what changes its inputs begins with fresh ones
        work()
        peak = self._peak(work)
        (timing,) = self.stopwatch(work)
        return BenchRow(
            *head,
            name,
            timing.median * 1e3,
            timing.low * 1e3,
            timing.high * 1e3,
            self.ceilings.share(cost, timing.median),
            off,
            bound,
            peak,
            exact.note,
        )

    def _peak(self, work: Pass) -> float | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 1e6


class Exact:
    """What the reference computes in float64: outputs, gradients, and the inputs that it changes in place.

    Where there is no room for float64 it is float32, and `note` says so.
    """

    def __init__(self, kernel: Kernel, args: Sequence[Any], options: Mapping[str, Any]):
        self.note = ""
        self.kernel, self.args, self.options = kernel, args, options
        self.results: list[Tensor | None] | None = None
        self.changed: list[int] = []

    def off(self, work: Pass) -> float | None:
        """How far a contender's results are from these, the worst of them; None where there is no room to know."""
        results = work.results()
        if self.results is None and not self._is_computed(work.given):
            return None
        assert self.results is not None
        results += [work.inputs[i].detach() for i in self.changed]
        if len(results) != len(self.results):
            raise KernelError(f"it gives {len(results)} results where the reference gives {len(self.results)}")
        pairs = [(r, e) for r, e in zip(results, self.results, strict=True) if r is not None and e is not None]
        return max((distance(result.to(right.dtype), right) for result, right in pairs), default=0.0)

    def _is_computed(self, given: Sequence[Tensor] | None) -> bool:
        for dtype, note in ((torch.float64, ""), (torch.float32, "error against float32")):
            try:
                self._compute(dtype, given)
                self.note = note
                return True
            except torch.OutOfMemoryError:
                free()
        self.note = "no room for its error"
        return False

    def _compute(self, dtype: torch.dtype, given: Sequence[Tensor] | None) -> None:
        work = Pass(self.kernel.reference, copied(self.args, dtype), self.options)
        work.given = None if given is None else [gradient.to(dtype) for gradient in given]
        versions = [leaf._version for leaf in work.inputs]
        results = work.results()
        self.changed = [i for i, leaf in enumerate(work.inputs) if leaf._version != versions[i]]
        self.results = [*results, *(work.inputs[i].detach() for i in self.changed)]


def copied(args: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """New leaves with the same values and strides, those in floating point as another dtype where one is given."""

    def copy(tensor: Tensor) -> Tensor:
        kind = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        new = torch.empty_like(tensor, dtype=kind).copy_(tensor.detach())
        return new.requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        made = tree_map_only(Tensor, copy, list(args))
    for leaf in tree_leaves(made):
        if isinstance(leaf, Tensor):
            leaf.grad = None
    return made


# ---------------------------------------------------------------------------------------------------------------------
# What is asked for


def bench_device() -> torch.device:
    """The device to measure on; refused where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if INTERPRETED:
        return torch.device("cpu")
    raise KernelError(
        "forge kernels bench measures on a CUDA device, and there is none here. To see it work on a CPU, in Triton's "
        "interpreter and without any meaning, add --interpret, and choose a case: --case NAME."
    )


def _cases(kernel: Kernel, wanted: str | None) -> list[Case]:
    found = [case for case in kernel.cases if wanted is None or wanted in case.name]
    if not found:
        names = [case.name for case in kernel.cases]
        raise KernelError(f"The kernel {kernel.name!r} has no case {wanted!r}.{did_you_mean(wanted or '', names)}")
    return found


def _dtypes(kernel: Kernel, wanted: Sequence[str] | None) -> list[torch.dtype]:
    """Those that are asked for; else bfloat16, as activations are, but float32 for what works on parameters."""
    known = {dtype_name(dtype): dtype for dtype in kernel.tolerance}
    if wanted is not None:
        return [known[name] for name in wanted if name in known]
    usual = "bfloat16" if _has_backward(kernel) else "float32"
    return [known.get(usual, next(iter(known.values())))]


def _has_backward(kernel: Kernel) -> bool:
    dtype = next(iter(kernel.tolerance))
    with FakeTensorMode():
        args = kernel.cases[0].make(torch.device("cpu"), dtype)
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(list(args)))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def package_version(module: str) -> str | None:
    """The version of a package that is installed, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return None


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()  # a shape of another case is not this one's recompile
    return torch.compile(function, dynamic=False)


def free() -> None:
    """Give back what nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
