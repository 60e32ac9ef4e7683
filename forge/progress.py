"""Counters and intervals: the progress of a run, and when something is due.

The units are *micro* (a micro-batch), *update* (an optimizer update), *sample* and *epoch*; an interval is written
``"500 updates"``, ``"1 epoch"``, ``"10000 samples"`` or ``"10 min"``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forge.errors import ForgeError


@dataclass(slots=True)
class Counters:
    """The counters of a run."""

    micro: int = 0
    "Micro-batches trained on."
    update: int = 0
    "Windows finished, skipped ones included: the x-axis of every log."
    sample: int = 0
    "Samples trained on."
    epoch: int = 0
    "Epochs finished."
    skipped: int = 0
    "Windows in which no optimizer stepped."


class RunClock(Protocol):
    """The attributes of a run that wall-clock intervals read."""

    progress: Counters
    agreed_time: float | None


class Position(Protocol):
    """The attributes of a step that intervals read."""

    index: int
    epoch: int
    samples: int
    samples_before: int
    ends_epoch: bool
    window: Sequence[Any]

    @property
    def trainer(self) -> RunClock: ...


_COUNTED = {"update": 1, "epoch": 1, "sample": 1}
_SECONDS = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600}


class Interval:
    """How often something happens: `Interval("500 updates")`, `"1 epoch"`, `"10000 samples"`, `"10 min"`.

    `due(step)` returns the same anywhere in a step, from its first hook to its boundary. Intervals in updates, epochs
    and samples are functions of the counters alone, so a resumed run keeps its rhythm; wall-clock intervals count from
    the first call, and on several ranks use the last agreed clock of rank 0.
    """

    __slots__ = ("_answer", "_last", "_run", "count", "unit")

    def __init__(self, text: str | int | Interval):
        self._last: float | None = None
        # a wall-clock interval is evaluated once per update, and starts again with every run
        self._run: Counters | None = None
        self._answer: tuple[int, bool] = (-1, False)
        if isinstance(text, Interval):
            self.count, self.unit = text.count, text.unit
            return
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", str(text))
        unit = match[2].lower() if match else ""
        unit = unit if unit in _SECONDS else unit.removesuffix("s")
        count = float(match[1]) if match else 0.0
        if not count < 2**53:
            unit = ""
        if unit in _SECONDS and count > 0:
            self.count, self.unit = count * _SECONDS[unit], "second"
        elif unit in _COUNTED and count >= 1 and count == int(count):
            self.count, self.unit = int(count), unit
        else:
            raise ForgeError(
                f"{text!r} is not an interval: write a whole number and a unit, "
                "as in '500 updates', '1 epoch', '10000 samples', '30 s', '10 min' or '2 h'."
            )

    def due(self, step: Position) -> bool:
        """Whether the interval ends with this step."""
        unit = self.unit
        if unit == "update":
            return (step.index + 1) % self.count == 0
        if unit == "epoch":
            return step.ends_epoch and (step.epoch + 1) % self.count == 0
        if unit == "sample":
            return (step.samples_before + step.samples) // self.count > step.samples_before // self.count
        progress = step.trainer.progress
        if self._run is not progress:
            self._run, self._last, self._answer = progress, None, (-1, False)
        if self._answer[0] != step.index:
            now = step.trainer.agreed_time
            now = time.monotonic() if now is None else now
            if self._last is None:
                self._last = now
            is_due = now - self._last >= self.count
            self._last = now if is_due else self._last
            self._answer = (step.index, is_due)
        return self._answer[1]

    def __repr__(self) -> str:
        return f"Interval({str(self)!r})"

    def __str__(self) -> str:
        return f"{self.count:g} {self.unit}{'' if self.count == 1 else 's'}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interval) and (self.count, self.unit) == (other.count, other.unit)

    def __hash__(self) -> int:
        return hash((self.count, self.unit))
