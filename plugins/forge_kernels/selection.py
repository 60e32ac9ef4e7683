"""Choose the fastest of a call's candidates on one device: a kernel, or the call as written."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from forge_kernels import patch
from forge_kernels.call_pattern import RecordedCall
from forge_kernels.contract import Functional, Kernel, Module, Subgraph
from forge_kernels.timing import Pass, Timing, Work, distance

GAIN = 0.03
"""The least share of the time that a kernel must save; smaller gains are noise."""
APART = 4
"""Allowed distance to the results of the original, in tolerances: the original has errors too."""
AS_WRITTEN = "as written"

Times = Callable[..., Sequence[Timing]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel and one of the functions or modules that it can replace."""

    kernel: Kernel
    replaces: Functional | Module | Subgraph

    @property
    def target(self) -> str:
        return self.replaces.target


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel chosen for a call, and the measurements."""

    call: RecordedCall
    kernel: str | None
    "The kernel to use; None: as written."
    ms: Mapping[str, float] = field(default_factory=dict)
    "Forward and backward in milliseconds, as written and by kernel."
    why: str = ""
    "Why nothing was measured, or why kernels were excluded."
    paths: tuple[str, ...] = ()
    "The names of the modules that make this call; empty for functions."

    def as_data(self) -> dict[str, Any]:
        data = {"kernel": self.kernel, "ms": dict(self.ms), "why": self.why, "paths": list(self.paths)}
        return {"call": self.call.as_data(), **data}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> KernelChoice:
        return cls(
            RecordedCall.from_data(data["call"]), data["kernel"], dict(data["ms"]), data["why"], tuple(data["paths"])
        )


def choose(
    call: RecordedCall,
    candidates: Sequence[Candidate],
    device: torch.device,
    times: Times,
    compiled: bool = False,
    module: nn.Module | None = None,
) -> KernelChoice:
    """Measure one call as written and with every candidate, compiled if the run is.

    A candidate is excluded if it falls back to the original, fails, or computes other results.
    """
    try:
        trial = KernelTrial(call, device, module)
        works: dict[str, Work] = {AS_WRITTEN: trial.work(trial.written, compiled)}
        reasons: dict[str, str] = {}
        for candidate in candidates:
            reason = trial.unfit(candidate)
            if reason is not None:
                reasons[candidate.kernel.name] = reason
                continue
            works[candidate.kernel.name] = trial.work(trial.stand_in(candidate, trial.written), compiled)
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        if len(works) == 1:
            return KernelChoice(call, None, why=why)
        with without_counting() if compiled else nullcontext():
            timings = times(*works.values())
    except torch.OutOfMemoryError:
        return KernelChoice(call, None, why="out of memory while measuring")
    ms = {name: timing.median * 1e3 for name, timing in zip(works, timings, strict=True)}
    best = min(ms, key=lambda name: ms[name])
    return KernelChoice(call, best if ms[best] <= (1 - GAIN) * ms[AS_WRITTEN] else None, ms, why)


class KernelTrial:
    """A call with random arguments, to run with any candidate."""

    def __init__(self, call: RecordedCall, device: torch.device, module: nn.Module | None):
        self.call, self.device, self.module = call, device, module
        self.written: Callable[..., Any] = patch.original(call.target) if module is None else module
        self.args, self.options = call.make(device)
        self.parameters = [] if module is None else list(module.parameters())

    def work(self, function: Callable[..., Any], compiled: bool = False) -> Pass:
        """Return a pass of a function over these arguments, under the call's autocast."""
        run = _in_autocast(_compiled(function) if compiled else function, self.call, self.device)
        return Pass(run, self.args, self.options, self.parameters)

    def stand_in(self, candidate: Candidate, written: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function or module that a candidate runs instead of the original."""
        replaces = candidate.replaces
        if isinstance(replaces, Functional):
            return functools.partial(replaces.call, written)
        assert self.module is not None
        assert isinstance(replaces, Module)
        new = patch.swapped(self.module, replaces.swap, candidate.kernel.name, type(self.module).__name__)
        return written if new is None else new

    def unfit(self, candidate: Candidate) -> str | None:
        """Return why a candidate cannot be used, or None."""
        spy = _Spy(self.written)
        try:
            results = self.work(self.stand_in(candidate, spy)).results()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"it fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        if spy.called:
            return "it does not take this call"
        expected = self.work(self.written).results()
        if len(results) != len(expected):
            return "it returns another number of results"
        bound = APART * _tolerance(candidate.kernel, self.call)
        for place, (result, right) in enumerate(zip(results, expected, strict=True)):
            if result is None or right is None:
                if result is not right:
                    return "it has gradients for other inputs"
            elif not (off := distance(result, right)) <= bound:
                return f"its {_ordinal(place)} result is off by {off:.1e}, outputs before gradients"
        return None


class _Spy:
    """The original function, recording whether a kernel fell back to it."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.called = function, False

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.called = True
        return self.function(*args, **options)


def _ordinal(place: int) -> str:
    return ("first", "second", "third")[place] if place < 3 else f"{place + 1}th"


def _tolerance(kernel: Kernel, call: RecordedCall) -> float:
    """Return the largest tolerance among the dtypes of a call."""
    dtypes = [like.dtype for like in call.tensors if like.dtype.is_floating_point]
    if call.autocast is not None:
        dtypes.append(call.autocast)
    return max((kernel.tolerance[dtype] for dtype in dtypes if dtype in kernel.tolerance), default=0.0)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    # a code object of its own: torch counts compilations of a shared one as recompiles
    measured.__code__ = measured.__code__.replace(co_name="measured")
    return torch.compile(measured, dynamic=False)


def _in_autocast(function: Callable[..., Any], call: RecordedCall, device: torch.device) -> Callable[..., Any]:
    """Run the forward under the call's autocast."""
    if call.autocast is None:
        return function

    def run(*args: Any, **options: Any) -> Any:
        with torch.autocast(device.type, call.autocast):
            return function(*args, **options)

    return run


@contextmanager
def without_counting() -> Iterator[None]:
    """Keep compilations meanwhile out of torch's counters of graphs, breaks and compilations, which report on the run.

    These counters are private to torch; one that is missing is skipped.
    """
    import torch._dynamo  # noqa: F401

    utils: Any = sys.modules.get("torch._dynamo.utils")
    counters = {name: dict(counts) for name, counts in getattr(utils, "counters", {}).items()}
    breaks = len(getattr(utils, "graph_break_reasons", ()))
    frames = len(getattr(utils, "_compilation_metrics", ()))
    try:
        yield
    finally:
        with suppress(AttributeError, TypeError, IndexError):
            utils.counters.clear()
            for name, counts in counters.items():
                utils.counters[name].update(counts)
        with suppress(AttributeError, TypeError, IndexError):
            del utils.graph_break_reasons[breaks:]
        with suppress(AttributeError, TypeError, IndexError):
            while len(utils._compilation_metrics) > frames:
                utils._compilation_metrics.pop()
