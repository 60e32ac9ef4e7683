"""What a search for speed finds: readings of a step, a row for each lever, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from forge.tuning.step_reading import StepReading
from forge_speed.levers import Change, Lever, Numbers


@dataclass(slots=True)
class LeverRow:
    """What the search found out about a lever."""

    lever: Lever
    why_not: str = ""
    "Why it was not used; empty if it was."
    alone: StepReading | None = None
    together: StepReading | None = None
    "The step with this lever added to those that were chosen before it."
    chosen: bool = False
    repeated: bool = False
    "Whether it was measured again because something disturbed it."
    failed: bool = False
    "Whether it was tried, and did not work."

    def rescale(self, factor: float) -> None:
        """Express the times at another pace of the machine."""
        self.alone = None if self.alone is None else replace(self.alone, ms=self.alone.ms * factor)
        self.together = None if self.together is None else replace(self.together, ms=self.together.ms * factor)

    @property
    def numbers(self) -> Numbers:
        """Return what it does to the numbers, as far as is known: a promise of equal bits must have been kept."""
        kept = self.alone is None or self.alone.same is not False
        return self.lever.numbers if kept or self.lever.numbers != "bitwise" else "rounding"


@dataclass(slots=True)
class SpeedReport:
    """The result of a search."""

    start: StepReading
    rows: list[LeverRow]
    best: StepReading | None = None
    "The answer, measured beside the start at the end; None if the start stays."
    chosen: list[Lever] = field(default_factory=list)
    fits: bool = True
    "Whether the answer stays within the limit of memory."
    reproducible: bool = True
    "Whether the start gave the same bits every time."
    noise: float = 0.0
    "By which share equal steps differed from their median, as a rule."
    extremes: tuple[float, float] = (0.0, 0.0)
    "The shortest and the longest reading of the start, in milliseconds."
    seconds: float = 0.0
    spent: bool = False
    "Whether the budget ended the search early."
    dropped: str = ""
    "The combination that lost against the start at the end."

    @property
    def change(self) -> Change:
        """Return the change of the recipe that is best."""
        change = Change()
        for lever in self.chosen:
            change |= lever.change
        return change

    @property
    def speedup(self) -> float:
        """Return how many times as fast the answer is."""
        return 1.0 if self.best is None else self.start.ms / self.best.ms
