"""What each implementation of each hook takes: running totals, and a ring of the latest spans.

`HookTimes.instrument` is given to `trainer.instrument`, the one place where implementations can be replaced, so that
nothing is wrapped where nobody asked. A span is (its totals, begin, end), in nanoseconds of `time.perf_counter_ns`; the
end of an update is (None, its number, when).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from pluggy import HookImpl

from forge.contract.stack import ACTIONS, CORE, ONE_BY_ONE
from forge.spans.device import DeviceTimes
from forge.spans.goodput import BESIDE, TimeAccount

RING = 2**16
"""Spans that are kept."""
PHASES = {
    "forge_prepare_batch": "to_device",
    "forge_forward": "forward",
    "forge_backward": "backward",
    "forge_optimizer_step": "optimizer",
}
"""The hooks that are the phases of an update."""
clock = time.perf_counter_ns

Function = Callable[..., Any]
Around = Callable[[str], AbstractContextManager[Any]]


class Total:
    """What one implementation of a hook took so far, in nanoseconds; its calls of others are not in it."""

    __slots__ = ("aside", "calls", "device", "hook", "plugin", "role", "spent", "worst")

    def __init__(self, hook: str, plugin: str, role: str, aside: bool):
        self.hook, self.plugin, self.role, self.aside = hook, plugin, role, aside
        self.clear()

    def clear(self) -> None:
        self.calls = self.spent = self.worst = self.device = 0

    def add(self, own: int) -> None:
        self.calls += 1
        self.spent += own
        self.worst = max(self.worst, own)


class HookTimes:
    """The times of one run. `around` opens a context for each call, by its name: a range in the trace of a profiler."""

    def __init__(
        self,
        account: TimeAccount,
        leave_out: Any = None,
        device: DeviceTimes | None = None,
        around: Around | None = None,
    ):
        self.account, self.device = account, device
        self.totals: dict[tuple[str, str, str], tuple[Total, Total]] = {}
        "By hook, plugin and role: what runs in updates, and what runs in a validation, a log or a checkpoint."
        self.ring: deque[tuple[Total | None, int, int]] = deque(maxlen=RING)
        self.updates = -1
        "Updates that are counted: those after the first."
        self.once: list[dict[str, Any]] = []
        "What ran before the end of the first update."
        self.leave_out, self._around = leave_out, around
        self._inside = self._aside = 0
        "Nanoseconds of spans inside the current one; whether it runs beside an update."
        self._before = dict(account.attempt.parts)

    # -- written ------------------------------------------------------------------------------------------------------

    def instrument(self, hook: str, impl: HookImpl) -> Function:
        """Return an implementation that is recorded."""
        function = self.account.instrument(hook, impl)
        if impl.plugin is self.leave_out or hook in ONE_BY_ONE:
            return function
        role = "wrap" if impl.wrapper else "event" if hook not in ACTIONS else "work"
        key = hook, impl.plugin_name, role
        totals = self.totals.setdefault(key, (Total(*key, False), Total(*key, True)))
        if role == "wrap":
            return lambda *args: TimedWrapper(function(*args), totals, self)
        if hook in BESIDE:
            function = self._beside(function)
        elif role == "work" and hook in PHASES and self.device is not None:
            function = self.device.timed(function, totals[0])
        if self._around is not None:
            name = hook.removeprefix("forge_")
            function = _within(function, self._around, PHASES.get(hook, name) if key[1] == CORE else f"{key[1]}.{name}")
        return self._timed(function, totals)

    def update(self, number: int) -> None:
        """Count an update that has ended; what came before the end of the first one is kept apart."""
        self.updates += 1
        self.ring.append((None, number, clock()))
        if self.updates == 0:
            self.once = [
                {"plugin": t.plugin, "hook": t.hook, "ms": t.spent / 1e6} for t in self._known() if t.plugin != CORE
            ]
            for total in self._known():
                total.clear()
            self._before = dict(self.account.attempt.parts)

    def enter(self) -> tuple[int, int]:
        outside, self._inside = self._inside, 0
        return outside, clock()

    def leave(self, outside: int, began: int) -> tuple[int, int]:
        """Return the time since `enter` without the spans inside it, and when it ended."""
        ended = clock()
        own = ended - began - self._inside
        self._inside = outside + ended - began
        return own, ended

    def _timed(self, function: Function, totals: tuple[Total, Total]) -> Function:
        keep = self.ring.append

        def call(*args: Any) -> Any:
            outside, self._inside = self._inside, 0
            began = clock()
            try:
                return function(*args)
            finally:  # `leave`, written out
                ended = clock()
                own = ended - began - self._inside
                self._inside = outside + ended - began
                total = totals[self._aside]
                total.calls += 1
                total.spent += own
                if own > total.worst:
                    total.worst = own
                keep((total, began, ended))

        return call

    def _beside(self, function: Function) -> Function:
        def call(*args: Any) -> Any:
            before, self._aside = self._aside, 1
            try:
                return function(*args)
            finally:
                self._aside = before

        return call

    # -- read ---------------------------------------------------------------------------------------------------------

    def _known(self) -> list[Total]:
        return [total for pair in self.totals.values() for total in pair if total.calls]

    def parts(self) -> dict[str, float]:
        """Return the seconds of an update by part of the run, since the first update."""
        many = max(self.updates, 1)
        return {name: (spent - self._before[name]) / many for name, spent in self.account.attempt.parts.items()}

    def phases(self, on_device: bool = False) -> dict[str, float]:
        """Return the seconds of an update by phase, of the host or of the device; `rest` is what hooks and the rhythm
        take beside the others."""
        found, parts, many = dict.fromkeys(PHASES.values(), 0.0), self.parts(), max(self.updates, 1)
        for total in self._known():
            if total.hook in PHASES and not total.aside:
                found[PHASES[total.hook]] += (total.device if on_device else total.spent) / many / 1e9
        rest = max(0.0, parts["update"] + parts["stall"] - sum(found.values()))
        return {"data": parts["data"], **found, "rest": rest} | {name: parts[name] for name in BESIDE.values()}

    def report(self) -> dict[str, Any]:
        """Return the average update as plain data, with a row for each plugin and hook, the most expensive first."""
        many, parts = max(self.updates, 1), self.parts()
        own = parts["update"] + parts["stall"]
        rows = [_row(total, many, own) for total in self._known()]
        costs = sum(row["us_per_update"] for row in rows if row["is_cost"])
        return {
            "updates": max(self.updates, 0),
            "update_us": own * 1e6,
            "total_us": costs,
            "total_share": costs / own / 1e6 if own else 0.0,
            "phases_us": {name: seconds * 1e6 for name, seconds in self.phases().items()},
            "rows": sorted((row for row in rows if row["plugin"] != CORE), key=lambda row: -row["us_per_update"]),
            "once": sorted(self.once, key=lambda row: -row["ms"]),
        }


def _row(total: Total, many: int, own: float) -> dict[str, Any]:
    each = total.spent / many / 1e3
    return {
        "plugin": total.plugin,
        "hook": total.hook,
        "role": total.role,
        "in_validation": total.aside and total.hook not in BESIDE,
        "is_cost": total.role != "work",  # else it does the work of an action in core's place
        "calls_per_update": total.calls / many,
        "us_per_update": each,
        "worst_us": total.worst / 1e3,
        "share": each / own / 1e6 if own else 0.0,
    }


def total_of(frame: FrameType) -> Total | None:
    """Return the totals of the span to which a frame of this file belongs."""
    found = frame.f_locals
    times = found.get("self")
    totals = found.get("totals")
    if isinstance(times, TimedWrapper):
        totals, times = times._totals, times._times
    return totals[times._aside] if totals is not None and isinstance(times, HookTimes) else None


def _within(function: Function, around: Around, name: str) -> Function:
    def call(*args: Any) -> Any:
        with around(name):
            return function(*args)

    return call


class TimedWrapper:
    """A wrapper's generator with a timer: counts the code before and after its yield, not in between."""

    __slots__ = ("_before", "_began", "_generator", "_times", "_totals")

    def __init__(self, generator: Generator[None, Any, Any], totals: tuple[Total, Total], times: HookTimes):
        self._generator, self._totals, self._times = generator, totals, times
        self._before = self._began = 0

    @property
    def gi_code(self) -> Any:
        """For messages that name the wrapper."""
        return self._generator.gi_code  # pyright: ignore[reportAttributeAccessIssue]

    def __next__(self) -> None:
        outside, self._began = self._times.enter()
        try:
            return next(self._generator)
        finally:
            self._before, _ = self._times.leave(outside, self._began)

    def send(self, value: Any) -> None:
        times = self._times
        outside, began = times.enter()
        try:
            return self._generator.send(value)
        finally:
            own, ended = times.leave(outside, began)
            total = self._totals[times._aside]
            total.add(self._before + own)
            times.ring.append((total, self._began, ended))

    def throw(self, error: BaseException) -> None:
        return self._generator.throw(error)

    def close(self) -> None:
        self._generator.close()
