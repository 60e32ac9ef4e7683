"""The picture of a search for speed: a bar for each lever alone, then the steps to the answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge.report.svg import bar_chart, write_svg
from forge.tuning.step_reading import StepReading, in_ms
from forge_speed.speed_report import SpeedReport

FASTER, PICK, SLOWER, START = 0, 1, 3, 7
"""Colours of bars."""
MEANING = {"bitwise": "same bits", "rounding": "other last bits", "precision": "other precision"}


@dataclass(frozen=True, slots=True)
class SpeedBar:
    """One line of the picture; a heading has no reading."""

    name: str
    reading: StepReading | None = None
    color: int = START
    note: str = ""

    @property
    def told(self) -> str:
        """The time, the memory and what it does to the numbers."""
        if self.reading is None:
            return ""
        memory = "" if self.reading.memory is None else f"{self.reading.memory / 1e9:.2f} GB"
        return "  ".join(filter(None, (f"{in_ms(self.reading.ms)} ms", memory, self.note)))


def draw_speed(report: SpeedReport, title: str, path: str | Path) -> Path:
    """Write the picture as an SVG file, whose name ends in .svg, and return its path."""
    bars = [SpeedBar(_subtitle(report)), *bars_of(report)]
    times = {bar: bar.reading.ms for bar in bars if bar.reading is not None}
    most = min(max(times.values()), 1.6 * report.start.ms)  # a lever that is far slower would hide the others
    lines = [(b.name, times.get(b), f"{b.told}{'  (cut)' * (times.get(b, 0) > most)}", b.color) for b in bars]
    return write_svg(path, bar_chart(lines, title, most, styled=True))


def bars_of(report: SpeedReport) -> list[SpeedBar]:
    """Return the lines of the picture: the start, levers alone from fast to slow, and the answer as it grew."""
    tried = sorted((row for row in report.rows if row.alone is not None), key=lambda row: row.alone.ms)  # pyright: ignore[reportOptionalMemberAccess]
    bars = [SpeedBar("start", report.start)]
    if tried:
        bars.append(SpeedBar("each lever alone"))
    for row in tried:
        assert row.alone is not None
        color = FASTER if row.alone.ms < report.start.ms else SLOWER
        bars.append(SpeedBar(row.lever.name, row.alone, color, MEANING[row.numbers]))
    if report.best is not None:
        bars.append(SpeedBar("together"))
        by_lever = {row.lever.name: row for row in report.rows}
        for i, lever in enumerate(report.chosen):
            last = i == len(report.chosen) - 1
            reading = report.best if last else by_lever[lever.name].together
            if reading is not None:
                bars.append(SpeedBar(lever.name if i == 0 else f"+ {lever.name}", reading, PICK if last else FASTER))
    return bars


def _subtitle(report: SpeedReport) -> str:
    best, start = report.best, report.start
    if best is None:
        return f"the start is the fastest that was found: {in_ms(start.ms)} ms"
    return f"{in_ms(start.ms)} ms to {in_ms(best.ms)} ms per update: {report.speedup:.2f} times as fast"
