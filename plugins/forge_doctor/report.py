"""DoctorReport: what an examination found, what it examined, and what a long run would need."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from forge_doctor.findings import Finding
from forge_doctor.readiness import Readiness


@dataclass
class Curve:
    """The losses of updates on one batch, and what they say."""

    losses: list[float]
    chance: float | None = None
    "The lowest loss of one answer for all samples; None if that is unknown."
    floor: float | None = None
    "The lowest loss of any prediction; None if that is unknown."
    reached: float = math.nan
    verdict: str = ""
    is_learnt: bool = False
    level: str = ""
    "That of the finding `cannot_learn_a_batch`: it stopped far from the floor. Empty where nothing shows a mistake."
    is_cut_short: bool = False
    "Whether the time was over before the updates were."
    cause: str = ""
    "The one change with which the batch is learnt."
    tried: dict[str, float] = field(default_factory=dict)
    "What the loss came to with each change that was tried."

    @property
    def start(self) -> float:
        return self.losses[0] if self.losses else math.nan


@dataclass
class DoctorReport:
    """What was found, and what was examined."""

    findings: list[Finding] = field(default_factory=list)
    "Errors first."
    silenced: list[Finding] = field(default_factory=list)
    "Findings that `task.expected` names."
    good: list[str] = field(default_factory=list)
    "What was examined and found good."
    skipped: dict[str, str] = field(default_factory=dict)
    "What could not be examined, and why."
    readiness: list[Readiness] = field(default_factory=list)
    "What a long run needs, and whether the planned one has it."
    worst: list[dict[str, Any]] = field(default_factory=list)
    "Samples of the first batch whose losses are far above the others' after a few updates."
    one_batch: Curve | None = None
    "The losses of updates on one batch, and what they say; None where they did not run, which `skipped` explains."
    partial: str = ""
    "Why the examination ended before it was whole: the time was over, or a signal came; empty if it is whole."
    seconds: float = 0.0

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "warning"]

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 2)}

    def __str__(self) -> str:
        lines = [f"{finding.level}: {finding.name}: {finding.message}" for finding in self.findings]
        return "\n".join(lines or ["Nothing was found."])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        from forge_doctor.printed import as_html

        return as_html(self)
