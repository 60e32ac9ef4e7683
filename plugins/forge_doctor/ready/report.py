"""ReadyReport: what each step on the road showed, as text, Markdown, one HTML page and plain data."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from forge.report.page import template
from forge.report.svg import STYLE
from forge.runs.wording import counted, duration
from forge.util.files import atomic_write
from forge.version import __version__

FORMAT = {"format": "forge-ready", "version": 1}
LEVELS = ("good", "note", "warning", "error")
NAMED = 3
"""Reasons in the first line; the others are counted."""


@dataclass(frozen=True, slots=True)
class Remark:
    """One line of a step: what was looked at, what was seen, and what may happen because of it."""

    level: str
    "good, note, warning or error."
    what: str
    evidence: str
    risk: str


@dataclass(frozen=True, slots=True)
class Grid:
    """A small table of figures."""

    heads: list[str]
    rows: list[list[str]]


@dataclass
class RoadStep:
    """One step on the road."""

    number: int
    name: str
    title: str
    needed: bool = False
    "Whether a run is not ready as long as this was not done."
    remarks: list[Remark] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    charts: dict[str, str] = field(default_factory=dict)
    "SVG by the name of its file."
    pictures: dict[str, bytes] = field(default_factory=dict)
    "PNG by the name of its file."
    facts: dict[str, Any] = field(default_factory=dict)
    "Figures for programs."
    seconds: float = 0.0
    left_out: str = ""
    "Why it was not done, or not to its end."

    def add(self, level: str, what: str, evidence: str, risk: str) -> None:
        self.remarks.append(Remark(level, what, evidence, risk))

    @property
    def level(self) -> str:
        """The worst level of its remarks."""
        return max((remark.level for remark in self.remarks), key=LEVELS.index, default="good")

    @property
    def result(self) -> str:
        """good, note, warning, error or left out."""
        return "left out" if self.left_out and self.level != "error" else self.level


@dataclass
class ReadyReport:
    """The answer to "may I start the long run?", and what it rests on."""

    name: str
    steps: list[RoadStep] = field(default_factory=list)
    budget: float = 0.0
    "In minutes."
    seconds: float = 0.0
    interrupted: int | None = None
    "The signal that ended the road early."
    folder: Path | None = None
    "Where ready.md is."

    def of(self, level: str) -> list[Remark]:
        return [remark for step in self.steps for remark in step.remarks if remark.level == level]

    @property
    def left_out(self) -> list[RoadStep]:
        return [step for step in self.steps if step.left_out]

    @property
    def why_left_out(self) -> dict[str, list[str]]:
        """The steps that were left out, or not done to their end, by the reason."""
        found: dict[str, list[str]] = {}
        for step in self.left_out:
            found.setdefault(step.left_out, []).append(f"{step.number} {step.title}")
        return found

    @property
    def may_start(self) -> bool:
        """Whether nothing speaks against the long run, and what shows that it trains was done."""
        return not self.of("error") and not any(step.needed for step in self.left_out)

    @property
    def answer(self) -> str:
        """Yes; yes, but …; or no, because …"""
        errors, skipped = self.of("error"), self.left_out
        undone = [step.title for step in skipped if step.needed]
        if errors:
            return f"No, because {_joined([f'{error.what}: {error.evidence}' for error in errors])}"
        if undone:
            return f"No, because this was not done: {_joined(undone)}. {skipped[0].left_out}"
        but = [warning.what for warning in self.of("warning")]
        if skipped:
            but.append(f"this was left out: {', '.join(step.title for step in skipped)}")
        return f"Yes, but {_joined(but)}" if but else "Yes: nothing speaks against it."

    def as_data(self) -> dict[str, Any]:
        """Return everything but pictures and charts, for JSON."""
        kept = ("number", "name", "title", "result", "left_out", "facts", "texts")
        return {
            **FORMAT,
            "may_start": self.may_start,
            "answer": self.answer,
            "name": self.name,
            "budget_minutes": self.budget,
            "seconds": round(self.seconds, 2),
            "interrupted": self.interrupted,
            "folder": None if self.folder is None else str(self.folder),
            "steps": [
                {
                    **{key: getattr(step, key) for key in kept},
                    "seconds": round(step.seconds, 2),
                    "remarks": [asdict(remark) for remark in step.remarks],
                    "tables": [asdict(grid) for grid in step.grids],
                }
                for step in self.steps
            ],
        }

    def __str__(self) -> str:
        lines = [f"May I start the long run? {self.answer}"]
        lines += [f"{step.number:2} {step.title}: {step.result}" for step in self.steps]
        return "\n".join(lines)

    # -- pages --------------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> str:
        early = " It was interrupted." if self.interrupted else ""
        return f"{duration(self.seconds)} of a budget of {self.budget:g} min, with forge {__version__}.{early}"

    def markdown(self) -> str:
        """Return the page as Markdown, with its pictures beside it."""
        rows = [[str(step.number), step.title, step.result, duration(step.seconds)] for step in self.steps]
        parts = ["# May I start the long run?", f"**{self.answer}**", f"`{self.name}`: {self.ending}"]
        parts += _table(Grid(["", "step", "result", "time"], rows))
        parts += [f"Left out: {', '.join(steps)}. {why}" for why, steps in self.why_left_out.items()]
        for step in self.steps:
            if step.remarks:
                parts += [f"## {step.number} {step.title}", *self._part(step)]
        return "\n\n".join(parts) + "\n"

    def _part(self, step: RoadStep) -> Iterator[str]:
        remarks = [[remark.level, remark.what, remark.evidence, remark.risk] for remark in step.remarks]
        yield from _table(Grid(["", "what", "evidence", "risk"], remarks))
        for grid in step.grids:
            yield from _table(grid)
        for name in [*step.pictures, *step.charts]:
            yield f"![{Path(name).stem.replace('-', ' ')}]({name})"
        if step.texts:
            lines = (f"{place}  {' '.join(text.split())}".replace("```", "` ` `") for place, text in step.texts)
            yield "\n".join(["```text", *lines, "```"])

    def html(self) -> str:
        """Return the same as one page, which loads nothing and runs no script."""
        return template(Path(__file__).with_name("page.html")).render(
            report=self,
            duration=duration,
            chart_style=Markup(STYLE),
            badges={"good": "finished", "error": "failed"},
            charts={step.name: [Markup(chart) for chart in step.charts.values()] for step in self.steps},
            sources={
                step.name: {name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in found}
                for step in self.steps
                if (found := step.pictures.items())
            },
        )

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own, so that its styles stay there."""
        return f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:720px;border:0"></iframe>'

    def save(self, folder: Path) -> None:
        """Write ready.md, ready.html, and the pictures beside them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for old in [*folder.glob("*.png"), *folder.glob("*.svg")]:
            old.unlink()
        files: dict[str, bytes] = {"ready.md": self.markdown().encode(), "ready.html": self.html().encode()}
        for step in self.steps:
            files |= step.pictures | {name: chart.encode() for name, chart in step.charts.items()}
        for name, content in files.items():
            with atomic_write(folder / name) as beside:
                beside.write_bytes(content)


def _joined(reasons: list[str]) -> str:
    more = len(reasons) - NAMED
    return "; ".join(reasons[:NAMED]) + (f"; and {counted(more, 'more reason')}" if more > 0 else "")


def _table(grid: Grid) -> list[str]:
    if not grid.rows:
        return []
    rows = [grid.heads, ["---"] * len(grid.heads), *grid.rows]
    return [
        "\n".join("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in rows)
    ]
