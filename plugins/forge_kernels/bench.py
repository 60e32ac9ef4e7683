"""Time a kernel's cases, forward and backward, against alternatives, and check its tolerance.

`forge kernels bench` and `python -m benchmarks.kernels` both run it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError, did_you_mean
from forge_kernels import discovery
from forge_kernels.contract import INTERPRETED, Case, Kernel, dtype_name
from forge_kernels.testing import as_new_leaves
from forge_kernels.timing import Ceilings, Pass, Stopwatch, distance, measure_ceilings

FORGE, AGAINST = "forge", ("eager", "compile")
"""The kernel, and its alternatives: torch's own function, and the compiled reference."""
TORCHS_OWN: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5),
    "rms_norm": lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
    "softmax": lambda x: F.softmax(x, dim=-1),
}
"""By kernel name, where the reference is not torch's own function: it computes in a wider dtype."""
SEED = 1234
TOO_LARGE = "error not measured: out of memory"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The measurement of one contender on one case."""

    kernel: str
    case: str
    dtype: str
    contender: str
    ms: float | None = None
    "Median of forward and backward; None if it did not run."
    ms_low: float | None = None
    ms_high: float | None = None
    "A fifth of the passes took less than `ms_low`, and a fifth more than `ms_high`."
    roofline: float | None = None
    "Share of the device's measured ceiling."
    error: float | None = None
    "Largest error over outputs and gradients: norm of the difference to the float64 reference over its norm."
    tolerance: float | None = None
    "The error that the contract allows."
    peak_mb: float | None = None
    "Peak memory of one pass, without its inputs."
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error is None or self.tolerance is None or self.error <= self.tolerance


class Bench:
    """Measures kernels on one device, after the device's ceilings."""

    def __init__(self, device: torch.device | None = None, against: Sequence[str] = AGAINST, quick: bool = False):
        self.device = bench_device() if device is None else device
        self.against = against
        self.stopwatch = Stopwatch(self.device, quick)
        self.ceilings: Ceilings = measure_ceilings(self.stopwatch)

    def describe(self) -> dict[str, Any]:
        """Return the device, its ceilings, and the versions of torch and Triton."""
        return {
            "device": device_name(self.device),
            "copy_bytes_per_s": self.ceilings.bytes,
            "bf16_flops_per_s": self.ceilings.flops,
            "torch": torch.__version__,
            "triton": discovery.package_version("triton"),
        }

    def rows(self, kernel: Kernel, case: str | None = None, dtypes: Sequence[str] | None = None) -> Iterator[BenchRow]:
        """Measure every contender in each dtype on every case, or on cases whose name contains `case`."""
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
        exact = Exact(kernel, args, case.options)
        for name, function in self._contenders(kernel).items():
            try:
                work = Pass(function, args, case.options)
                off, peak = exact.off(work), self._peak(work)
                (timing,) = self.stopwatch(work)
            except Exception as error:  # one failing contender must not stop the others
                yield BenchRow(*head, name, note=_short(error))
            else:
                ms, low, high = (1e3 * seconds for seconds in (timing.median, timing.low, timing.high))
                share = self.ceilings.share(kernel.cost(*args, **case.options), timing.median)
                bound = kernel.tolerance.get(dtype) if name == FORGE else None
                yield BenchRow(*head, name, ms, low, high, share, off, bound, peak, exact.note)
            free()

    def _contenders(self, kernel: Kernel) -> dict[str, Callable[..., Any]]:
        made = {FORGE: kernel.function}
        if "eager" in self.against:
            made["eager"] = TORCHS_OWN.get(kernel.name, kernel.reference)
        if "compile" in self.against:
            torch.compiler.reset()  # else another case's shape would count as a recompile
            made["compile"] = torch.compile(kernel.reference, dynamic=False)
        return made

    def _peak(self, work: Pass) -> float | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 1e6


class Exact:
    """The reference's results in float64, outputs and gradients. If float64 does not fit in memory it is float32, and
    `note` says so."""

    def __init__(self, kernel: Kernel, args: Sequence[Any], options: Mapping[str, Any]):
        self.note = ""
        self.kernel, self.args, self.options = kernel, args, options
        self.results: list[Tensor | None] | None = None

    def off(self, work: Pass) -> float | None:
        """Return the largest error of a contender's results; None if the reference does not fit in memory."""
        results = work.results()
        if self.results is None and self.note != TOO_LARGE:
            self._compute(work.given)
        if self.results is None:
            return None
        if len(results) != len(self.results):
            raise KernelError(f"it gives {len(results)} results where the reference gives {len(self.results)}")
        pairs = [(r, e) for r, e in zip(results, self.results, strict=True) if r is not None and e is not None]
        return max((distance(result.to(right.dtype), right) for result, right in pairs), default=0.0)

    def _compute(self, given: Sequence[Tensor] | None) -> None:
        for dtype, note in ((torch.float64, ""), (torch.float32, "error against float32")):
            work = Pass(self.kernel.reference, as_new_leaves(self.args, dtype), self.options)
            work.given = None if given is None else [gradient.to(dtype) for gradient in given]
            try:
                self.results, self.note = work.results(), note
                return
            except torch.OutOfMemoryError:
                del work
                free()
        self.note = TOO_LARGE


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def bench_device() -> torch.device:
    """Return the device to measure on; raise KernelError without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if INTERPRETED:
        return torch.device("cpu")
    raise KernelError(
        "forge kernels bench needs a CUDA device, and none is available. To try it on a CPU in Triton's interpreter, "
        "without meaningful times, add --interpret, and choose a case: --case NAME."
    )


def _cases(kernel: Kernel, wanted: str | None) -> list[Case]:
    found = [case for case in kernel.cases if wanted is None or wanted in case.name]
    if not found:
        names = [case.name for case in kernel.cases]
        raise KernelError(f"The kernel {kernel.name!r} has no case {wanted!r}.{did_you_mean(wanted or '', names)}")
    return found


def _dtypes(kernel: Kernel, wanted: Sequence[str] | None) -> list[torch.dtype]:
    """Return the requested dtypes; by default bfloat16, if the kernel has it."""
    known = {dtype_name(dtype): dtype for dtype in kernel.tolerance}
    if wanted is not None:
        return [known[name] for name in wanted if name in known]
    return [known.get("bfloat16", next(iter(known.values())))]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def free() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
