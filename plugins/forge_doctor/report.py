"""DoctorReport: what an examination found, and what it examined."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from forge_doctor.findings import Finding


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
    partial: str = ""
    "Why the examination ended before it was whole: the time was over, or a signal came; empty if it is whole."
    seconds: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    "What the run consists of, by what it is about."

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
