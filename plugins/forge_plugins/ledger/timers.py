"""Time hook implementations, each without its calls into others."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from pluggy import HookImpl

from forge.contract.stack import ACTIONS, CORE, ONE_BY_ONE

Function = Callable[..., Any]
clock = time.perf_counter_ns
ROUNDS, CALLS = 7, 200
"""Rounds and calls that measure the cost of timing; the fastest round counts."""


class Cell:
    """The cost of one implementation of one hook so far, in nanoseconds."""

    __slots__ = ("calls", "hook", "plugin", "role", "spent", "worst")

    def __init__(self, plugin: str, hook: str, role: str):
        self.plugin, self.hook, self.role = plugin, hook, role
        self.calls = self.spent = self.worst = 0


@dataclass(frozen=True, slots=True)
class Price:
    """One empty call, in nanoseconds."""

    bare: float = 0.0
    "Without a timer."
    seen: float = 0.0
    "As its timer records it."
    full: float = 0.0
    "With its timer."

    def net(self, calls: int, spent: float) -> float:
        """Return the cost of calls without timers, from the recorded time."""
        return max(0.0, spent + calls * (self.bare - self.seen))

    def timing(self, calls: int) -> float:
        """Return the cost of the timers of so many calls."""
        return calls * max(0.0, self.full - self.bare)


class Timers:
    """Implements `trainer.instrument` for one run, and holds the measurements."""

    def __init__(self, leave_out: Any):
        self.leave_out = leave_out
        self.cells: list[Cell] = []
        self.inside = 0
        "Nanoseconds of timed calls inside the current one."
        self.clock = clock
        self.call, self.wrapper = Price(), Price()

    def instrument(self, hook: str, impl: HookImpl) -> Function:
        """Return an implementation with a timer; core's own stays unchanged."""
        if impl.plugin_name == CORE or impl.plugin is self.leave_out or hook in ONE_BY_ONE:
            return impl.function
        role = "wrap" if impl.wrapper else "own" if hook in ACTIONS else "event"
        cell = Cell(impl.plugin_name, hook, role)
        self.cells.append(cell)
        return self.timed(impl.function, cell)

    def timed(self, function: Function, cell: Cell) -> Function:
        if cell.role == "wrap":
            return lambda *args: TimedWrapper(function(*args), cell, self)
        now = self.clock

        def call(*args: Any) -> Any:
            outside, self.inside = self.inside, 0
            began = now()
            try:
                return function(*args)
            finally:
                took = now() - began
                own = took - self.inside
                self.inside = outside + took
                cell.calls += 1
                cell.spent += own
                if own > cell.worst:
                    cell.worst = own

        return call

    def price(self, cell: Cell) -> Price:
        """Return the cost of an empty call of this kind."""
        return self.wrapper if cell.role == "wrap" else self.call

    def calibrate(self) -> None:
        """Time empty calls, so that the cost of timing can be subtracted."""
        self.call = self._price("event", _nothing, _call)
        self.wrapper = self._price("wrap", _nothing_around, _drive)

    def _price(self, role: str, function: Function, use: Function) -> Price:
        cell = Cell("", "", role)
        timed = self.timed(function, cell)
        bare, full, seen = [], [], []
        for _ in range(ROUNDS):
            cell.spent = 0
            bare.append(self._round(function, use))
            full.append(self._round(timed, use))
            seen.append(cell.spent / CALLS)
        return Price(min(bare), min(seen), min(full))

    def _round(self, function: Function, use: Function) -> float:
        began = self.clock()
        for _ in range(CALLS):
            use(function)
        return (self.clock() - began) / CALLS


class TimedWrapper:
    """A wrapper's generator with a timer: counts the code before and after its yield, not in between."""

    __slots__ = ("_before", "_cell", "_generator", "_timers")

    def __init__(self, generator: Generator[None, Any, Any], cell: Cell, timers: Timers):
        self._generator, self._cell, self._timers = generator, cell, timers
        self._before = 0

    @property
    def gi_code(self) -> Any:
        """For messages that name the wrapper."""
        return self._generator.gi_code  # pyright: ignore[reportAttributeAccessIssue]

    def __next__(self) -> None:
        timers = self._timers
        outside, timers.inside = timers.inside, 0
        began = timers.clock()
        try:
            return next(self._generator)
        finally:
            took = timers.clock() - began
            self._before = took - timers.inside
            timers.inside = outside + took

    def send(self, value: Any) -> None:
        timers, cell = self._timers, self._cell
        outside, timers.inside = timers.inside, 0
        began = timers.clock()
        try:
            return self._generator.send(value)
        finally:
            took = timers.clock() - began
            own = self._before + took - timers.inside
            timers.inside = outside + took
            cell.calls += 1
            cell.spent += own
            if own > cell.worst:
                cell.worst = own

    def throw(self, error: BaseException) -> None:
        return self._generator.throw(error)

    def close(self) -> None:
        self._generator.close()


def _nothing(step: Any) -> None: ...


def _nothing_around(step: Any) -> Generator[None, Any, Any]:
    return (yield)


def _call(function: Function) -> None:
    function(None)


def _drive(function: Function) -> Any:
    around = function(None)
    next(around)
    try:
        around.send(None)
    except StopIteration as stop:
        return stop.value
