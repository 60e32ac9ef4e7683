"""The picture of a search for speed: a bar for each lever alone, then the steps to the answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.report.ticks import nice_ticks
from forge.tuning.plot import (
    GRID,
    INK,
    LEFT,
    LOST,
    LOST_INK,
    OTHER,
    PAPER,
    PICK,
    RIGHT,
    SOFT,
    WIDTH,
    PlotCanvas,
    write_png,
)
from forge.tuning.step_reading import StepReading, in_ms
from forge_speed.speed_report import SpeedReport

FASTER, SLOWER, START = "#2458b8", "#b9c7dd", "#8a94a3"
ROW, BAR, HEAD, FOOT = 40, 22, 104, 76
NAMES, ROOM = 320, 190
"""Columns for the names on the left, and for the numbers right of the longest bar."""
MEANING = {"bitwise": "same bits", "rounding": "other last bits", "precision": "other precision"}


@dataclass(frozen=True, slots=True)
class SpeedBar:
    """One line of the picture."""

    name: str
    reading: StepReading | None
    color: str = START
    note: str = ""
    heading: bool = False


def draw_speed(report: SpeedReport, title: str, path: str | Path) -> Path:
    """Write the picture as a PNG file, and return its path."""
    bars = bars_of(report)
    height = HEAD + ROW * len(bars) + FOOT
    return write_png(path, height, lambda pen: SpeedPlot(pen, report, bars, height).draw(title))


def bars_of(report: SpeedReport) -> list[SpeedBar]:
    """Return the lines of the picture: the start, levers alone from fast to slow, and the answer as it grew."""
    tried = sorted((row for row in report.rows if row.alone is not None), key=lambda row: row.alone.ms)  # pyright: ignore[reportOptionalMemberAccess]
    bars = [SpeedBar("start", report.start, START)]
    if tried:
        bars.append(SpeedBar("each lever alone", None, heading=True))
    for row in tried:
        assert row.alone is not None
        color = FASTER if row.alone.ms < report.start.ms else SLOWER
        bars.append(SpeedBar(row.lever.name, row.alone, color, MEANING[row.numbers]))
    if report.best is not None:
        bars.append(SpeedBar("together", None, heading=True))
        by_lever = {row.lever.name: row for row in report.rows}
        for i, lever in enumerate(report.chosen):
            last = i == len(report.chosen) - 1
            reading = report.best if last else by_lever[lever.name].together
            if reading is not None:
                bars.append(SpeedBar(lever.name if i == 0 else f"+ {lever.name}", reading, PICK if last else FASTER))
    return bars


class SpeedPlot(PlotCanvas):
    """The drawing of one report."""

    def __init__(self, pen: Any, report: SpeedReport, bars: list[SpeedBar], height: int):
        self.pen, self.report, self.bars, self.height = pen, report, bars, height
        times = [bar.reading.ms for bar in bars if bar.reading is not None]
        self.most = min(max(times), 1.6 * report.start.ms)  # a lever that is far slower would hide the others
        self.left = LEFT - 60 + NAMES

    def x(self, ms: float) -> float:
        return self.left + min(ms / self.most, 1.0) * (WIDTH - RIGHT - ROOM - self.left)

    def draw(self, title: str) -> None:
        floor = self.height - FOOT
        self._text(LEFT - 60, 48, title, 28, INK, "ls")
        self._text(LEFT - 60, 78, self._subtitle(), 18, SOFT, "ls")
        start = self.x(self.report.start.ms)
        self._box(start, HEAD, self.x(self.most), floor, LOST)
        for tick in nice_ticks(0.0, self.most):
            self._stroke([(self.x(tick), HEAD), (self.x(tick), floor)], GRID, 1)
            self._text(self.x(tick), floor + 24, f"{tick:.10g}", 18, SOFT, "ms")
        self._text((self.left + self.x(self.most)) / 2, self.height - 16, "milliseconds per update", 20, INK, "ms")
        for i, bar in enumerate(self.bars):
            self._bar(bar, HEAD + ROW * i + ROW / 2)
        for top in range(HEAD, floor, 14):
            self._stroke([(start, top), (start, min(top + 8, floor))], OTHER, 1.5)
        self._stroke([(self.left, HEAD), (self.left, floor)], INK, 1.5)
        if self.x(self.most) - start > 150:
            self._text(self.x(self.most) - 10, HEAD + 20, "slower than the start", 16, LOST_INK, "rs")

    def _subtitle(self) -> str:
        best, start = self.report.best, self.report.start
        if best is None:
            return f"the start is the fastest that was found: {in_ms(start.ms)} ms"
        return f"{in_ms(start.ms)} ms to {in_ms(best.ms)} ms: {self.report.speedup:.2f} times as fast"

    def _bar(self, bar: SpeedBar, y: float) -> None:
        if bar.reading is None:
            self._text(LEFT - 60, y + 8, bar.name, 18, SOFT, "ls")
            return
        picked = bar.color == PICK
        self._text(self.left - 14, y + 6, bar.name, 18, PICK if picked else INK, "rs")
        right = self.x(bar.reading.ms)
        self._box(self.left, y - BAR / 2, right, y + BAR / 2, bar.color)
        memory = "" if bar.reading.memory is None else f"   {bar.reading.memory / 1e9:.2f} GB"
        column = WIDTH - RIGHT - ROOM + 90
        self._text(column, y + 6, f"{in_ms(bar.reading.ms)} ms", 17, PICK if picked else INK, "rs")
        self._text(column, y + 6, memory, 17, PICK if picked else SOFT, "ls")
        if bar.reading.ms > self.most:  # the bar is cut
            self._box(right - 16, y - BAR / 2, right - 12, y + BAR / 2, PAPER)
        inside = right - self.left > self._length(bar.note, 14) + 20
        ink = SOFT if not inside else PAPER if bar.color == FASTER else INK
        self._text((self.left if inside else right) + 8, y + 5, bar.note, 14, ink, "ls")
