"""What each implementation of each hook takes: running totals, and on request every span.

`HookTimes.instrument` is given to `trainer.instrument`, the one place where implementations can be replaced, so that
nothing is wrapped where nobody asked. Of core's own, the phases of an update are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from types import FrameType, GeneratorType
from typing import TYPE_CHECKING, Any

from pluggy import HookImpl

from forge.contract.stack import ACTIONS, CORE, ONE_BY_ONE
from forge.spans.goodput import BESIDE, TimeAccount

if TYPE_CHECKING:
    from forge.spans.device import DeviceTimes

PHASES = {
    "forge_prepare_batch": "to_device",
    "forge_forward": "forward",
    "forge_backward": "backward",
    "forge_optimizer_step": "optimizer",
}
"""The hooks that are the phases of an update."""
clock = time.perf_counter_ns

Function = Callable[..., Any]


class Total:
    """What one implementation of a hook took so far, in nanoseconds; its calls of others are not in it."""

    __slots__ = ("aside", "calls", "device", "hook", "plugin", "role", "spent", "worst")

    def __init__(self, hook: str, plugin: str, role: str, aside: bool):
        self.hook, self.plugin, self.role, self.aside = hook, plugin, role, aside
        self.clear()

    def clear(self) -> None:
        self.calls = self.spent = self.worst = self.device = 0


Span = tuple[Total | None, int, int]
"""Totals, begin and end in nanoseconds of `time.perf_counter_ns`; the end of an update is (None, its number, when)."""


class HookTimes:
    """The times of one run. `keeps` says whether every span is kept, until somebody takes it from `spans`."""

    def __init__(self, account: TimeAccount, leave_out: Any = None, keeps: bool = False):
        self.account, self.leave_out = account, leave_out
        self.totals: dict[tuple[str, str, str], tuple[Total, Total]] = {}
        "By hook, plugin and role: what runs in updates, and what runs in a validation, a log or a checkpoint."
        self.spans: list[Span] | None = [] if keeps else None
        self.updates = -1
        "Updates that are counted: those after the first."
        self._inside = 0
        "Nanoseconds of spans inside the current one."
        self._before = dict(account.attempt.parts)

    # -- written ------------------------------------------------------------------------------------------------------

    def instrument(self, hook: str, impl: HookImpl) -> Function:
        """Return an implementation that is recorded."""
        function = self.account.instrument(hook, impl)
        is_rhythm = impl.plugin_name == CORE and hook not in PHASES and hook not in BESIDE
        if impl.plugin is self.leave_out or hook in ONE_BY_ONE or is_rhythm:
            return function
        role = "wrap" if impl.wrapper else "event" if hook not in ACTIONS else "work"
        key = hook, impl.plugin_name, role
        totals = self.totals.setdefault(key, (Total(*key, False), Total(*key, True)))
        if role == "wrap":
            before, after = self._timed(next, totals), self._timed(GeneratorType.send, totals)
            return lambda *args: TimedWrapper(function(*args), before, after)
        return self._timed(function, totals, self.account.device if role == "work" and hook in PHASES else None)

    def update(self, number: int) -> None:
        """Count an update that has ended; what came before the end of the first one is not counted."""
        self.updates += 1
        if self.spans is not None:
            self.spans.append((None, number, clock()))
        if self.updates == 0:
            for total in self._known():
                total.clear()
            if self.account.device is not None:
                self.account.device.forget()
            self._before = dict(self.account.attempt.parts)

    def _timed(self, function: Function, totals: tuple[Total, Total], device: DeviceTimes | None = None) -> Function:
        account, keep = self.account, None if self.spans is None else self.spans.append

        def call(*args: Any) -> Any:
            outside, self._inside = self._inside, 0
            mark = None if device is None else device.begin()
            began = clock()
            try:
                return function(*args)
            finally:
                ended = clock()
                took = ended - began
                own = took - self._inside
                self._inside = outside + took
                total = totals[account.aside]
                total.calls += 1
                total.spent += own
                if own > total.worst:
                    total.worst = own
                if device is not None:
                    device.end(mark, total)
                if keep is not None:
                    keep((total, began, ended))

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
        if self.account.device is not None:
            self.account.device.collect()
        for total in self._known():
            if total.hook in PHASES and not total.aside:
                found[PHASES[total.hook]] += (total.device if on_device else total.spent) / many / 1e9
        rest = max(0.0, parts["update"] + parts["stall"] - sum(found.values()))
        return {"data": parts["data"], **found, "rest": rest} | {name: parts[name] for name in BESIDE.values()}

    def report(self) -> dict[str, Any]:
        """Return the average update as plain data, with a row for each plugin and hook, the most expensive first."""
        many, parts = max(self.updates, 1), self.parts()
        own = parts["update"] + parts["stall"]
        rows = [_row(total, many, own) for total in self._known() if total.plugin != CORE]
        costs = sum(row["us_per_update"] for row in rows if row["is_cost"])
        return {
            "updates": max(self.updates, 0),
            "update_us": own * 1e6,
            "total_us": costs,
            "total_share": costs / own / 1e6 if own else 0.0,
            "phases_us": {name: seconds * 1e6 for name, seconds in self.phases().items()},
            "rows": sorted(rows, key=lambda row: -row["us_per_update"]),
        }


def _row(total: Total, many: int, own: float) -> dict[str, Any]:
    each = total.spent / many / 1e3
    halves = 2 if total.role == "wrap" else 1
    return {
        "plugin": total.plugin,
        "hook": total.hook,
        "role": total.role,
        "in_validation": total.aside and total.hook not in BESIDE,
        "is_cost": total.role != "work",  # else it does the work of an action in core's place
        "calls_per_update": total.calls / halves / many,
        "us_per_update": each,
        "worst_us": total.worst / 1e3,
        "share": each / own / 1e6 if own else 0.0,
    }


def total_of(frame: FrameType) -> Total | None:
    """Return the totals of the span to which a frame of this file belongs."""
    found = frame.f_locals
    return found["totals"][found["account"].aside] if frame.f_code.co_name == "call" else None


class TimedWrapper:
    """A wrapper's generator with a timer: counts the code before and after its yield, not in between."""

    __slots__ = ("_after", "_before", "_generator")

    def __init__(self, generator: Generator[None, Any, Any], before: Function, after: Function):
        self._generator, self._before, self._after = generator, before, after

    @property
    def gi_code(self) -> Any:
        """For messages that name the wrapper."""
        return self._generator.gi_code  # pyright: ignore[reportAttributeAccessIssue]

    def __next__(self) -> None:
        return self._before(self._generator)

    def send(self, value: Any) -> None:
        return self._after(self._generator, value)

    def throw(self, error: BaseException) -> None:
        return self._generator.throw(error)

    def close(self) -> None:
        self._generator.close()
