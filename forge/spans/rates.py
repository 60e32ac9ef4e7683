"""Rates of updates: samples, tokens and FLOPs a second, times of steps, and the share of waiting for data."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.util.text import duration

AT_ONCE = 256
"""Updates that a long log interval may hold before finished ones are collected."""
clock = time.perf_counter


class TimedUpdate(NamedTuple):
    """One update: from the beginning of its wait for data to the end of its step."""

    samples: int
    items: Tensor | float = 0.0
    "What its samples consist of: tokens, say."
    waited: float = 0.0
    "Seconds for which the host waited for the loader."
    seconds: float = 0.0


class StepClock:
    """Times updates by the host's clock; on a device by events, which the host reads later: nothing waits.

    There an update lasts from where the device began to wait for it, or still worked on the one before, to its end: the
    time of the slower of host and device.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None, stream: Any = None):
        self._make_event, self._stream = make_event, stream
        self._start: Any = None
        self._pending: deque[tuple[Any, Any, TimedUpdate]] = deque()
        self._done: list[TimedUpdate] = []
        self._free: list[Any] = []

    @classmethod
    def on(cls, device: torch.device) -> StepClock:
        """Return the clock for a device."""
        if device.type != "cuda":
            return cls()
        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.current_stream(device))

    def begin(self) -> None:
        self._start = self._mark()

    def end(self, update: TimedUpdate) -> None:
        if isinstance(update.items, Tensor):  # a copy to pinned memory, which is there when the event has passed
            update = update._replace(items=update.items.detach().to("cpu", non_blocking=True))
        self._pending.append((self._start, self._mark(), update))
        if len(self._pending) >= AT_ONCE:
            self._collect()

    def take(self) -> list[TimedUpdate]:
        """Return the updates known to be finished, each once, without waiting."""
        self._collect()
        done, self._done = self._done, []
        return done

    def _mark(self) -> Any:
        if self._make_event is None:
            return clock()
        event = self._free.pop() if self._free else self._make_event()
        event.record(self._stream)
        return event

    def _collect(self) -> None:
        while self._pending and (self._make_event is None or self._pending[0][1].query()):
            start, stop, update = self._pending.popleft()
            seconds = stop - start if self._make_event is None else start.elapsed_time(stop) / 1e3
            self._done.append(update._replace(items=float(update.items), seconds=seconds))
            if self._make_event is not None:
                self._free += [start, stop]


def rates(
    updates: Sequence[TimedUpdate], items: str | None, flops: float | None = None, peak: float | None = None
) -> dict[str, float]:
    """Return the rates of some updates. `items` is the name of what they consist of, `flops` the FLOPs of a sample, and
    `peak` those that the device can compute in a second."""
    seconds = sum(update.seconds for update in updates)
    if not seconds:
        return {}
    samples, times = sum(update.samples for update in updates), [update.seconds for update in updates]
    found = {"samples_per_s": samples / seconds}
    if items is not None:
        found[f"{items}_per_s"] = sum(float(update.items) for update in updates) / seconds
    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        found[f"step_ms_{name}"] = 1e3 * percentile(times, share)
    found["data_wait_share"] = sum(update.waited for update in updates) / seconds
    if flops is not None:
        found["tflops"] = flops * samples / seconds / 1e12
        found |= {} if peak is None else {"mfu": flops * samples / seconds / peak}
    return found


def percentile(times: Iterable[float], share: float) -> float:
    """Return the time that a share of the `times` does not exceed."""
    ordered = sorted(times)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def as_sentence(found: dict[str, float]) -> str:
    """Return rates as one line."""
    parts = [
        f"{value:,.4g} {name.removesuffix('_per_s')}/s" for name, value in found.items() if name.endswith("_per_s")
    ]
    median, most, slowest = (duration(found[f"step_ms_{name}"] / 1e3) for name in ("p50", "p95", "max"))
    parts.append(f"{median} per step at the median (95% within {most}, slowest {slowest})")
    parts.append(f"{found['data_wait_share']:.1%} of the time waiting for data")
    parts += [f"{found['tflops']:.4g} TFLOP/s"] if "tflops" in found else []
    parts += [f"{found['mfu']:.1%} of the peak"] if "mfu" in found else []
    return f"{', '.join(parts)}; in steps, without logs, validation and saves"
