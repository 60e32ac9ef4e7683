"""Collectives in a trace: how long they take, and how much of it is exposed: nothing is computed at the same time."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forge_plugins.profiler.intervals import Interval, Span, covers, length, minus, times_of, union

KINDS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "send/recv": "send|recv",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""Kinds of collectives, by what is in their names once underscores are gone; the first match counts."""
OTHER = "other collectives"
NCCL, GLOO = re.compile(r"nccl\w*kernel", re.IGNORECASE), "gloo:"
WAITING = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms", "nccl:", GLOO)
"""Operators of the host that start collectives or wait for them."""
CALL, SCATTERS = "c10d::", re.compile("c10d::_?reduce_scatter")
"""Calls of collectives. gloo has no reduce_scatter and runs an all_reduce, so the latest call tells its kind."""
COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")


@dataclass(frozen=True, slots=True)
class Collectives:
    """All collectives of one kind."""

    kind: str
    calls: int
    seconds: float
    "Seconds in which one of them ran."
    exposed: float
    "Seconds of these in which nothing was computed."

    @property
    def overlapped(self) -> float:
        return self.seconds - self.exposed


@dataclass(frozen=True, slots=True)
class Communication:
    """The collectives of a recorded window."""

    kinds: list[Collectives]
    "Most exposed first."
    all: Collectives
    "Of every kind; collectives that run at the same time count once."


NONE = Communication([], Collectives("all", 0, 0.0, 0.0))


def is_collective(span: Span) -> bool:
    """Whether a span is a collective at work: a kernel of NCCL, or gloo's own work on the host."""
    if span.kind == "kernel":
        return NCCL.match(span.name) is not None
    return span.kind in ("cpu_op", "user_annotation") and span.name.startswith(GLOO)


def kind_of(name: str) -> str:
    """Return the kind of collective that a name belongs to."""
    plain = name.partition("(")[0].replace("_", "").lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, plain)), OTHER)


def communication(
    collectives: list[Span], host: list[Span], computing: list[Interval], holes: list[Interval], begin: float
) -> Communication:
    """Divide collectives into exposed and overlapped; `holes` (evaluations) and times before `begin` are left out."""
    calls = sorted((span.start, SCATTERS.match(span.name) is not None) for span in host if span.name.startswith(CALL))
    counted = [span for span in collectives if span.start >= begin and not covers(holes, span.start)]
    if not counted:
        return NONE

    def of(kind: str, spans: list[Span]) -> Collectives:
        at_work = minus(times_of(spans), holes)
        return Collectives(kind, len(spans), length(at_work), length(minus(at_work, computing)))

    by_kind: dict[str, list[Span]] = {}
    for span in counted:
        call = bisect_right(calls, (span.start, True)) - 1
        scatter = span.name.startswith(GLOO) and call >= 0 and calls[call][1]
        by_kind.setdefault("reduce_scatter" if scatter else kind_of(span.name), []).append(span)
    kinds = sorted((of(*item) for item in by_kind.items()), key=lambda each: (-each.exposed, -each.seconds))
    return Communication(kinds, of("all", counted))


def computing_on_host(host: Iterable[Span]) -> list[Interval]:
    """Return when operators compute on any thread: without autograd's and torch.distributed's, in which a thread may
    wait for others."""
    computing: dict[object, list[Interval]] = {}
    waiting: dict[object, list[Interval]] = {}
    for span in host:
        times = waiting if span.name.startswith(WAITING) else computing if _computes(span) else None
        if times is not None:
            times.setdefault(span.thread, []).append((span.start, span.end))
    return union(
        interval
        for thread, times in computing.items()
        for interval in minus(union(times), union(waiting.get(thread, ())))
    )


def _computes(span: Span) -> bool:
    named: Callable[..., bool] = span.name.startswith
    return named(COMPILED) or (span.kind == "cpu_op" and "::" in span.name and not named(("autograd::", "torch::")))
