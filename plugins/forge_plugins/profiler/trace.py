"""Analyse a Chrome trace of torch's profiler: seconds and counts.

The file is read rather than the profiler's own objects: its format is the same in every torch, a trace of an
accelerator can be written by hand in a test, and reading it is faster.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_plugins.profiler.communication import (
    NONE,
    WAITING,
    Communication,
    communication,
    computing_on_host,
    is_collective,
)
from forge_plugins.profiler.intervals import Interval, Span, covers, length, minus, times_of, union

DATA, TRANSFER, FORWARD, BACKWARD, STEP, EVALUATION = "data", "transfer", "forward", "backward", "step", "evaluation"
UPDATE, BETWEEN = "update", "between"
PHASES: tuple[str, ...] = (DATA, TRANSFER, FORWARD, BACKWARD, STEP, UPDATE, BETWEEN, EVALUATION)
"""The ranges of an update; `update` is the rest of an update, `between` the rest of the window."""
INSIDE: dict[str, tuple[str | None, ...]] = {
    DATA: (None,),
    EVALUATION: (None,),
    UPDATE: (None,),
    **dict.fromkeys((TRANSFER, FORWARD, BACKWARD, STEP), (UPDATE, STEP)),
}
"""Parents that a range must have to be forge's: a model may use the same names. A closure runs inside `step`."""

DISPATCH = 10e-6
"""Overhead of an operator call on the host, in seconds; the time beyond it is work."""
WAITS = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize")
OURS = re.compile(r"update (\d+)( .*)?")


def range_name(update: int, optimizer: str | None) -> str:
    """Return the name of the range around a train step."""
    return f"update {update}" if optimizer is None else f"update {update} {optimizer}"


@dataclass(slots=True)
class Operator:
    """All calls of one operator, or all runs of one kernel."""

    name: str
    calls: int = 0
    cpu: float = 0.0
    "Seconds on the host, without the operators that it calls."
    device: float = 0.0
    "Seconds on the device, of the kernels that it launched itself."
    memory: int = 0
    "Bytes that it allocated itself, freed or not."


@dataclass(slots=True)
class Trace:
    """One recorded window; times are totals over it, without evaluations."""

    begin: float = 0.0
    "When the window began, on the trace's clock."
    window: float = 0.0
    "Seconds from the first recorded update's data to the end of the last, on host and device."
    phases: dict[str, float] = field(default_factory=dict)
    "Seconds of the host by phase, each without those inside it."
    operators: list[Operator] = field(default_factory=list)
    kernels: list[Operator] = field(default_factory=list)
    calls: int = 0
    "Operator calls of the updates."
    work: float = 0.0
    "Seconds of the updates' operators on the host, without the overhead of calls."
    busy: float = 0.0
    "Seconds in which the device computed."
    communication: Communication = NONE
    "Collectives of several ranks."
    communicating: float = 0.0
    "Seconds in which nothing but a collective was at work."
    copying: float = 0.0
    "Seconds in which it only copied from or to the host."
    starved: float = 0.0
    "Seconds in which it was idle while the host waited for data."
    waits: Counter[str] = field(default_factory=Counter)
    "Waits of the host for the device, by operator."
    copied: int = 0
    "Bytes that were copied to the device."
    pageable: int = 0
    "Bytes of them from unpinned memory."
    memory: dict[tuple[int, int], list[tuple[float, int]]] = field(default_factory=dict)
    "By (kind, number) of the device: (seconds from the window's start, bytes in use)."
    ranges: list[tuple[str, float, float]] = field(default_factory=list)
    "Phases with start and end, in seconds from the window's start."


def analyse(events: Iterable[Mapping[str, Any]], data_waits: Mapping[int, float]) -> Trace:
    """Analyse the events of a trace. `data_waits` are the seconds that each update waited for its data: `data` ranges
    do not show the beginning of an epoch."""
    host, device, waits, instants = _sorted_by_kind(events)
    steps = [span for span in host if span.name.startswith("ProfilerStep#")]
    if not steps:
        raise ValueError("the trace has no ProfilerStep: nothing was recorded")
    begin, thread = min(span.start for span in steps), steps[0].thread
    host_end = max(span.end for span in steps)
    end = max([host_end, *(span.end for span in device)])
    _nest([*host, *instants])

    phases = list(_phases(span for span in host if span.thread == thread))
    starts: dict[int, float] = {}
    for name, span in phases:
        if name == UPDATE and (match := OURS.fullmatch(span.name)):
            starts.setdefault(int(match[1]), span.start)
    seen = [(span.start, span.end) for name, span in phases if name == DATA]
    waited = [(at - data_waits.get(update, 0.0), at) for update, at in starts.items()]
    updates = times_of(span for name, span in phases if name == UPDATE)
    evaluations = times_of(span for name, span in phases if name == EVALUATION)
    data = minus(minus(minus(union([*seen, *waited]), updates), evaluations), [(float("-inf"), begin)])
    window = minus([(begin, end)], evaluations)

    trace = Trace(begin, length(window), _times(phases))
    trace.phases[DATA] = length(data)
    trace.phases[BETWEEN] = max(0.0, host_end - begin - length(updates) - length(data) - length(evaluations))
    trace.ranges = [(name, span.start - begin, span.end - begin) for name, span in phases]
    _count_operators(trace, host, device, instants, evaluations)
    _add_up_work(trace, [span for span in host if span.thread == thread], steps, union([*data, *evaluations]))
    collectives = [span for span in [*device, *host] if is_collective(span)]
    computing = _watch_device(trace, device, collectives, data, evaluations)
    computing = computing if trace.kernels else computing_on_host(host)
    trace.communication = communication(collectives, host, computing, evaluations, begin)
    elsewhere = union([*evaluations, (float("-inf"), begin), *(() if trace.kernels else data)])
    trace.communicating = length(minus(minus(times_of(collectives), computing), elsewhere))
    names = {span.id: span.name for span in host if span.kind == "cpu_op" and span.id}
    counted = minus([(begin, host_end)], evaluations)  # the last wait is the profiler's
    trace.waits = Counter(names.get(wait.id, wait.name) for wait in waits if covers(counted, wait.start))
    for instant in instants:
        trace.memory.setdefault(instant.device, []).append((instant.start - begin, instant.total))
    return trace


# ---------------------------------------------------------------------------------------------------------------------
# Reading events


def _sorted_by_kind(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span], list[Span], list[Span]]:
    """Return host operators and ranges, device work, waits of the host, and changes of memory."""
    host: list[Span] = []
    device: list[Span] = []
    waits: list[Span] = []
    instants: list[Span] = []
    launched_by: dict[int, int] = {}
    for event in events:
        kind, whole = event.get("cat"), event.get("ph") == "X"
        if whole and kind in ("cpu_op", "user_annotation"):
            host.append(_span(event))
        elif whole and kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append(_span(event))
        elif whole and kind in ("cuda_runtime", "cuda_driver"):
            launched_by[event["args"].get("correlation", 0)] = event["args"].get("External id", 0)
            if WAITS.match(event["name"]):
                waits.append(_span(event))
        elif event.get("name") == "[memory]":
            instants.append(_span(event))
    for span in device:
        span.id = span.id or launched_by.get(span.correlation, 0)
    return host, device, waits, instants


def _span(event: Mapping[str, Any]) -> Span:
    start, micros, args = event["ts"], event.get("dur", 0), event.get("args", {})
    return Span(
        name=event["name"],
        kind=event["cat"],
        start=start / 1e6,
        end=(start + micros) / 1e6,
        thread=(event.get("pid"), event.get("tid")),
        id=args.get("External id", 0),
        correlation=args.get("correlation", 0),
        own=micros / 1e6,
        bytes=args.get("Bytes", args.get("bytes", 0)),
        total=args.get("Total Allocated", 0),
        device=(args.get("Device Type", 0), max(0, args.get("Device Id", 0))),
    )


def _nest(spans: list[Span]) -> None:
    """Set the parent of each span, and subtract its time from the parent's own."""
    around: dict[Any, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        stack = around.setdefault(span.thread, [])
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if stack:
            span.parent = stack[-1]
            span.parent.own -= span.end - span.start
        stack.append(span)


def _phases(spans: Iterable[Span]) -> Iterator[tuple[str, Span]]:
    """Return forge's own ranges, outer ones first."""
    known: dict[int, str] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        name = UPDATE if OURS.fullmatch(span.name) else span.name
        if span.kind == "user_annotation" and name in INSIDE and _around(span, known) in INSIDE[name]:
            known[id(span)] = name
            yield name, span


def _around(span: Span, known: Mapping[int, str]) -> str | None:
    """Return the phase of a span."""
    outer = span.parent
    while outer is not None and id(outer) not in known:
        outer = outer.parent
    return None if outer is None else known[id(outer)]


def _times(phases: list[tuple[str, Span]]) -> dict[str, float]:
    """Return seconds by phase, each without those inside it."""
    known = {id(span): name for name, span in phases}
    seconds = dict.fromkeys(PHASES, 0.0)
    for name, span in phases:
        seconds[name] += span.end - span.start
        around = _around(span, known)
        if around is not None:
            seconds[around] -= span.end - span.start
    return seconds


# ---------------------------------------------------------------------------------------------------------------------
# Counting


def _count_operators(
    trace: Trace, host: list[Span], device: list[Span], instants: list[Span], evaluations: list[Interval]
) -> None:
    operators: dict[str, Operator] = {}
    kernels: dict[str, Operator] = {}
    launched_by: dict[int, str] = {}
    for span in host:
        if span.kind != "cpu_op" or covers(evaluations, span.start):
            continue
        operator = operators.setdefault(span.name, Operator(span.name))
        operator.calls += 1
        operator.cpu += max(0.0, span.own)
        launched_by[span.id] = span.name
    for span in device:
        if covers(evaluations, span.start):
            continue
        kernel = kernels.setdefault(span.name, Operator(span.name))
        kernel.calls += 1
        kernel.device += span.end - span.start
        if span.id in launched_by:
            operators[launched_by[span.id]].device += span.end - span.start
    for instant in instants:
        if instant.parent is not None and instant.parent.name in operators and instant.bytes > 0:
            operators[instant.parent.name].memory += instant.bytes
    trace.operators, trace.kernels = list(operators.values()), list(kernels.values())


def _add_up_work(trace: Trace, host: list[Span], steps: list[Span], elsewhere: list[Interval]) -> None:
    """What the operators of the updates' own thread did, other than to load data and to evaluate.

    An operator that the system interrupts lasts longer without working more, so the median counts: of each call over
    the updates, where all make the same calls; else of the updates.
    """
    begins = sorted(step.start for step in steps)
    calls: list[list[tuple[str, float]]] = [[] for _ in begins]
    for span in sorted(host, key=lambda span: (span.start, -span.end)):
        if span.kind == "cpu_op" and not span.name.startswith(WAITING) and not covers(elsewhere, span.start):
            update = bisect_right(begins, span.start) - 1
            calls[update].append((span.name, max(0.0, span.own - DISPATCH)))
    names, work = [[name for name, _ in update] for update in calls], [[each for _, each in update] for update in calls]
    trace.calls = sum(map(len, calls))
    if all(of_update == names[0] for of_update in names):
        trace.work = sum(map(statistics.median_low, zip(*work, strict=True))) * len(begins)
    else:
        trace.work = statistics.median_low(map(sum, work)) * len(begins)


def _watch_device(
    trace: Trace, device: list[Span], collectives: list[Span], data: list[Interval], evaluations: list[Interval]
) -> list[Interval]:
    """Split the window's time by activity of the device; return when it computed."""
    copies = [span for span in device if "HtoD" in span.name or "DtoH" in span.name]
    others = {id(span) for span in [*copies, *collectives]}
    busy = minus(times_of(span for span in device if id(span) not in others), evaluations)
    working = union([*busy, *times_of(collectives)])
    copying = minus(minus(times_of(copies), evaluations), working)
    idle_data = minus(minus(data, working), copying)
    trace.busy, trace.copying, trace.starved = length(busy), length(copying), length(idle_data)
    for span in copies:
        if "HtoD" in span.name and not covers(evaluations, span.start):
            trace.copied += span.bytes
            trace.pageable += span.bytes if "Pageable" in span.name else 0
    return busy
