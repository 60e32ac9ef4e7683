"""Where the time of a run went, over all of its attempts: RUN/goodput.json, read.

Each attempt has the seconds of its parts, which add up to its wall time, and a mark at every checkpoint. What it did
after the checkpoint that a later one went on from was done again: that time is lost, whatever it was spent on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.runs import wording
from forge.runs.folder import as_dict, read_object

FILE = "goodput.json"
PARTS = {
    "update": "updates that count",
    "start": "start",
    "compile": "compiling",
    "data": "waiting for data",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "stall": "stalls",
    "other": "logs and the rest",
    "lost": "work that was lost",
}
"""The parts of an attempt's wall time, with their names for people."""

Mark = tuple[int, dict[str, float]]
"""An update, and the seconds of every part until its checkpoint."""


@dataclass(frozen=True, slots=True)
class TimedAttempt:
    """One process that trained the run."""

    began: float
    "When, in seconds since 1970."
    update: int
    "The update that it went on from."
    parts: dict[str, float]
    marks: tuple[Mark, ...]
    "The first one when training began, then one for each checkpoint."

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The account of a run."""

    parts: dict[str, float]
    "Seconds by part, of all attempts together."
    attempts: int
    between: float
    "Seconds between attempts, in which nothing ran: in a queue, say. They are no part of the wall time."
    promised: float | None = None
    "The share that was expected."

    @property
    def seconds(self) -> float:
        """The wall time of all attempts."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """The share of the wall time in updates that count."""
        return self.parts["update"] / self.seconds

    def as_json(self) -> dict[str, Any]:
        rounded = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        return {
            "share": round(self.share, 4),
            "promised": self.promised,
            "seconds": rounded,
            "attempts": self.attempts,
            "between": round(self.between, 3),
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (part, time, share of the wall time), the longest after the updates first."""
        rest = sorted((name for name in PARTS if name != "update"), key=lambda name: -self.parts[name])
        return [
            (PARTS[name], wording.duration(self.parts[name]), f"{self.parts[name] / self.seconds:.1%}")
            for name in ("update", *rest)
            if self.parts[name] > 0
        ]

    def sentence(self) -> str:
        """ "92.1% of 3 h 20 min over 2 attempts (promised: 94.0%)"."""
        over = f" over {self.attempts} attempts" if self.attempts > 1 else ""
        expected = "" if self.promised is None else f" (promised: {self.promised:.1%})"
        return f"{self.share:.1%} of {wording.duration(self.seconds)}{over}{expected}"

    def short(self) -> str:
        """ "92% (promised: 94%)"."""
        return f"{self.share:.0%}" + ("" if self.promised is None else f" (promised: {self.promised:.0%})")

    def markdown(self) -> str:
        """Return a section for the run card."""
        lines = [
            "## Where the time went",
            "",
            f"In updates that count: {self.sentence()}.",
            "",
            "| | | |",
            "|---|---|---|",
        ]
        lines += [f"| {' | '.join(row)} |" for row in self.rows()]
        waited = f"\nBetween attempts nothing ran for {wording.duration(self.between)}.\n" if self.between else ""
        return "\n".join([*lines, waited])


def since(parts: Mapping[str, float], marks: Sequence[Mark], update: int) -> dict[str, float]:
    """Return the parts after a step back to an update: the time since its mark is lost."""
    kept = [mark for mark in marks if mark[0] <= update] or list(marks[:1])
    if not kept:
        return dict(parts)
    before = kept[-1][1]
    again = sum(parts.values()) - sum(before.values())
    return {**dict.fromkeys(PARTS, 0.0), **before, "lost": before.get("lost", 0.0) + max(0.0, again)}


def account(attempts: Sequence[TimedAttempt], promised: float | None = None) -> TimeSpent | None:
    """Add up the attempts of a run; None if no time was recorded."""
    total, ended, between = dict.fromkeys(PARTS, 0.0), None, 0.0
    for number, attempt in enumerate(attempts):
        later = [other.update for other in attempts[number + 1 :]]
        parts = since(attempt.parts, attempt.marks, min(later)) if later else attempt.parts
        total = {name: total[name] + parts.get(name, 0.0) for name in PARTS}
        between += max(0.0, attempt.began - ended) if ended is not None else 0.0
        ended = attempt.began + attempt.seconds
    return TimeSpent(total, len(attempts), between, promised) if sum(total.values()) > 0 else None


def read(folder: Path) -> TimeSpent | None:
    """Return the account of a run folder; None if it has none."""
    promised = _number(read_object(folder / FILE).get("promised"))
    return account(attempts_in(folder), promised if 0 < promised <= 1 else None)


def attempts_in(folder: Path) -> list[TimedAttempt]:
    """Read the attempts, which are not trusted."""
    return [_attempt(as_dict(record)) for record in _list(read_object(folder / FILE).get("attempts"))]


def _attempt(record: Mapping[str, Any]) -> TimedAttempt:
    marks = [mark for mark in _list(record.get("marks")) if isinstance(mark, list) and len(mark) == 2]
    return TimedAttempt(
        _number(record.get("began")),
        int(_number(record.get("update"))),
        _parts(record.get("parts")),
        tuple((int(_number(update)), _parts(parts)) for update, parts in marks),
    )


def _parts(value: Any) -> dict[str, float]:
    return {name: _number(as_dict(value).get(name)) for name in PARTS}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    """Return a number of seconds or updates; 0 for what is none."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 2**53 else 0.0
