"""Where the time of a run goes, over all of its attempts: counted while it trains, and read from RUN/spans.json.

Each attempt has the seconds of its parts, which add up to its wall time, and a mark at every checkpoint. What it did
after the checkpoint that a later one went on from was done again: that time is lost, whatever it was spent on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.util.tables import piped
from forge.util.text import duration

if TYPE_CHECKING:  # `forge runs` reads the account, and imports no torch
    from pluggy import HookImpl

    from forge.contract.dispatch import Instrument
    from forge.contract.step import Step
    from forge.spans.device import DeviceTimes

FILE = "spans.json"
PARTS = {
    "update": "updates that count",
    "start": "start, with the first update",
    "compile": "compiling",
    "data": "waiting for data",
    "evaluate": "validation",
    "checkpoint": "checkpoints",
    "log": "logs",
    "stall": "stalls",
    "end": "the end",
    "lost": "work that was lost",
}
"""The parts of an attempt's wall time, with their names for people."""
BESIDE = {"forge_evaluate": "evaluate", "forge_log": "log", "forge_save": "checkpoint", "forge_export": "checkpoint"}
"""Hooks that run beside the updates, by part."""
STALL = (10.0, 1.0)
"""An update is a stall if it takes this many times as long as usual, and this many seconds."""
WEIGHT = 0.05
"""Of the latest update in what is usual."""
MOST_MARKS = 100
"""Checkpoints whose moments are kept: a run goes on from one of the newest."""
clock = time.perf_counter

Parts = dict[str, float]
Mark = tuple[int, Parts]
"""An update, and the seconds of every part until its checkpoint."""


@dataclass(slots=True)
class TimedAttempt:
    """One process that trained the run."""

    began: float
    "When, in seconds since 1970."
    update: int
    "The update that it went on from."
    parts: Parts
    marks: list[Mark]
    "The first one when training began, then one for each checkpoint."


class TimeAccount:
    """Counts the time of the attempt that runs. `compiled` returns the seconds that torch compiled since its last call.

    An update lasts from boundary to boundary. What is `BESIDE` the updates, and the wait for data, is not in it; a
    device is told of the pauses.
    """

    def __init__(
        self,
        compiled: Callable[[], float] = lambda: 0.0,
        inner: Instrument | None = None,
        device: DeviceTimes | None = None,
    ):
        self.attempt = TimedAttempt(time.time(), 0, dict.fromkeys(PARTS, 0.0), [])
        self.usual: float | None = None
        "Seconds of an update."
        self.ended = clock()
        "When the latest update ended."
        self.took = 0.0
        "Seconds of the latest update, with its wait for data."
        self.aside = False
        "Whether what runs now is beside the updates."
        self.inner, self.device = inner, device
        "What else replaces implementations."
        self._compiled = compiled
        self._beside = 0.0
        "Seconds since then that were no part of an update."
        self._saved = self._restores = -1

    def instrument(self, hook: str, impl: HookImpl) -> Callable[..., Any]:
        """Return an implementation that counts as the part that its hook is, beside the updates."""
        function = impl.function if self.inner is None else self.inner(hook, impl)
        part = BESIDE.get(hook)
        if part is None or impl.wrapper:
            return function

        def call(*args: Any) -> Any:
            if self.aside:
                return function(*args)
            self.aside, began = True, clock()
            if self.device is not None:
                self.device.pause()
            try:
                return function(*args)
            finally:
                took, self.aside = clock() - began, False
                self.attempt.parts[part] += took
                self._beside += took
                if self.device is not None:
                    self.device.go_on()

        return call

    def update(self, step: Step) -> bool:
        """Count an update that has ended; return whether a checkpoint was written before it."""
        now, trainer, parts = clock(), step.trainer, self.attempt.parts
        own, self.ended, self._beside = now - self.ended - self._beside, now, 0.0
        if self._restores < 0:
            parts["start"] += own
            self._begin(step)
            return False
        saves = trainer.saved_at != self._saved
        if trainer.restores != self._restores:
            own = self._go_back(trainer.resumed_from or 0, own)
            self._restores, self._saved, saves = trainer.restores, trainer.saved_at, False
        elif saves:
            self._mark(trainer.saved_at)
        self.took, waited = own, min(step.data_wait, own)
        own -= waited
        self.attempt.parts["data"] += waited
        self.attempt.parts["update"] += own
        usual = self.usual
        if usual is None:
            self.usual = own
        elif own > STALL[1] and own > STALL[0] * usual:
            self._stall(own - usual)
        else:
            self.usual = usual + WEIGHT * (own - usual)
        return saves

    def end(self, saved_at: int) -> None:
        """Count what came after the last update."""
        now = clock()
        self.attempt.parts["end"] += now - self.ended - self._beside
        self.ended, self._beside = now, 0.0
        if self._restores >= 0 and saved_at != self._saved:
            self._mark(saved_at)

    def settle(self, part: str = "update") -> float:
        """Take the seconds in which torch compiled out of a part, and return them."""
        took = min(self._compiled(), self.attempt.parts[part])
        self.attempt.parts[part] -= took
        self.attempt.parts["compile"] += took
        return took

    def _begin(self, step: Step) -> None:
        trainer = step.trainer
        self._restores, self._saved = trainer.restores, -1 if trainer.resumed_from is None else trainer.saved_at
        self.attempt.update = trainer.resumed_from or 0
        self.settle("start")
        self.attempt.marks = [(self.attempt.update, dict(self.attempt.parts))]

    def _mark(self, update: int) -> None:
        self._saved, marks = update, self.attempt.marks
        self.attempt.marks = [*marks[:1], *marks[1:][-MOST_MARKS:], (update, dict(self.attempt.parts))]

    def _go_back(self, update: int, own: float) -> float:
        """Lose what came after a checkpoint; return the time of the update after it, without the way back."""
        attempt, usual = self.attempt, min(own, own if self.usual is None else self.usual)
        attempt.parts = since(attempt.parts, attempt.marks, update)
        attempt.parts["lost"] += own - usual
        attempt.marks = [mark for mark in attempt.marks if mark[0] <= update]
        return usual

    def _stall(self, excess: float) -> None:
        excess = max(0.0, excess - self.settle())
        self.attempt.parts["update"] -= excess
        self.attempt.parts["stall"] += excess


# ---------------------------------------------------------------------------------------------------------------------
# Read


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The account of a run."""

    parts: Parts
    "Seconds by part, of all attempts together."
    attempts: int
    between: float
    "Seconds between attempts, in which nothing ran: in a queue, say. They are no part of the wall time."

    @property
    def seconds(self) -> float:
        """The wall time of all attempts."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """The share of the wall time in updates that count: goodput."""
        return self.parts["update"] / self.seconds

    def as_json(self) -> dict[str, Any]:
        rounded = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        between = round(self.between, 3)
        return {"share": round(self.share, 4), "seconds": rounded, "attempts": self.attempts, "between": between}

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (part, time, share of the wall time), the longest after the updates first."""
        rest = sorted((name for name in PARTS if name != "update"), key=lambda name: -self.parts[name])
        known = [(PARTS[name], self.parts[name]) for name in ("update", *rest) if self.parts[name] > 0]
        return [(what, duration(seconds), f"{seconds / self.seconds:.1%}") for what, seconds in known]

    def sentence(self) -> str:
        """ "92.1% of 3 h 20 min over 2 attempts"."""
        over = f" over {self.attempts} attempts" if self.attempts > 1 else ""
        waited = f"; between attempts nothing ran for {duration(self.between)}" if self.between else ""
        return f"{self.share:.1%} of {duration(self.seconds)}{over}{waited}"

    def markdown(self) -> str:
        """Return a section for the run card."""
        table = "\n".join(piped([("part", "time", "share"), *self.rows()]))
        return f"## Where the time went\n\nIn updates that count: {self.sentence()}.\n\n{table}\n"


def since(parts: Mapping[str, float], marks: Sequence[Mark], update: int) -> Parts:
    """Return the parts after a step back to an update: the time since its mark is lost."""
    kept = [mark for mark in marks if mark[0] <= update] or list(marks[:1])
    if not kept:
        return dict(parts)
    before = kept[-1][1]
    again = sum(parts.values()) - sum(before.values())
    return {**dict.fromkeys(PARTS, 0.0), **before, "lost": before.get("lost", 0.0) + max(0.0, again)}


def account(attempts: Sequence[TimedAttempt]) -> TimeSpent | None:
    """Add up the attempts of a run; None if no time was recorded."""
    total, ended, between = dict.fromkeys(PARTS, 0.0), None, 0.0
    for number, attempt in enumerate(attempts):
        later = [other.update for other in attempts[number + 1 :]]
        parts = since(attempt.parts, attempt.marks, min(later)) if later else attempt.parts
        total = {name: total[name] + parts.get(name, 0.0) for name in PARTS}
        between += max(0.0, attempt.began - ended) if ended is not None else 0.0
        ended = attempt.began + sum(attempt.parts.values())
    return TimeSpent(total, len(attempts), between) if sum(total.values()) > 0 else None


def attempts_in(record: Mapping[str, Any]) -> list[TimedAttempt]:
    """Read the attempts of a file, which is not trusted."""
    return [_attempt(each) for each in _list(record.get("attempts")) if isinstance(each, dict)]


def spent(record: Mapping[str, Any]) -> TimeSpent | None:
    """Return the account of a run by its file; None if it has none."""
    return account(attempts_in(record))


def _attempt(record: Mapping[str, Any]) -> TimedAttempt:
    marks = [mark for mark in _list(record.get("marks")) if isinstance(mark, list) and len(mark) == 2]
    update = int(_number(record.get("update")))
    kept = [(int(_number(at)), _parts(parts)) for at, parts in marks]
    return TimedAttempt(_number(record.get("began")), update, _parts(record.get("parts")), kept)


def _parts(value: Any) -> Parts:
    return {name: _number(value.get(name)) if isinstance(value, dict) else 0.0 for name in PARTS}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    """Return a number of seconds or updates; 0 for what is none."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 2**53 else 0.0
