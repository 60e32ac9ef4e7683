"""The plot of a range test, drawn with Pillow: loss against learning rate, with the conclusions marked."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forge.errors import ForgeError
from forge.report.ticks import nice_ticks
from forge.tuning.lr import LRCurve, rate_text

WIDTH, HEIGHT = 1200, 720
SCALE = 2
"""Everything is drawn this many times larger and then reduced, which makes lines smooth."""
LEFT, RIGHT, TOP, BOTTOM = 96, 40, 92, 84
INK, SOFT, GRID, PAPER = "#1f2933", "#66707c", "#e6e9ed", "#ffffff"
RAW, CURVE, PICK, OTHER = "#b9c7dd", "#2458b8", "#d9480f", "#8a94a3"
LOST, LOST_INK = "#fdeceb", "#c5605a"


def draw_lr(curve: LRCurve, title: str, path: str | Path) -> Path:
    """Write the plot as a PNG file, and return its path."""
    return write_png(path, HEIGHT, lambda pen: LRPlot(pen, curve).draw(title))


def write_png(path: str | Path, height: int, draw: Callable[[Any], None]) -> Path:
    """Have a plot drawn, write it as a PNG file, and return its path."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise ForgeError("The plot needs Pillow: pip install pillow") from error
    image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), PAPER)
    draw(ImageDraw.Draw(image))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((WIDTH, height), Image.Resampling.LANCZOS).save(path, "PNG")
    return path


class PlotCanvas:
    """Strokes in the coordinates of the finished plot."""

    pen: Any

    def _stroke(self, points: Sequence[tuple[float, float]], color: str, width: float) -> None:
        big = [(x * SCALE, y * SCALE) for x, y in points]
        self.pen.line(big, fill=color, width=round(width * SCALE), joint="curve")

    def _box(self, left: float, top: float, right: float, bottom: float, color: str) -> None:
        self.pen.rectangle(_big(left, top, right, bottom), fill=color)

    def _text(self, x: float, y: float, text: str, size: int, color: str, anchor: str) -> None:
        self.pen.text((x * SCALE, y * SCALE), text, fill=color, font=_font(size), anchor=anchor)

    def _length(self, text: str, size: int) -> float:
        return self.pen.textlength(text, font=_font(size)) / SCALE


class LRPlot(PlotCanvas):
    """The drawing of one curve. Coordinates are those of the finished plot; `x` and `y` convert values to them."""

    def __init__(self, pen: Any, curve: LRCurve):
        self.pen, self.curve = pen, curve
        self.smoothed = curve.smoothed
        self.lowest, self.highest = math.log10(curve.rates[0]), math.log10(curve.diverged or curve.rates[-1])
        self.highest = max(self.highest, self.lowest + 0.1)
        self.bottom, self.top = shown_range(curve.losses, self.smoothed)

    def draw(self, title: str) -> None:
        self._grid()
        self._line(self.curve.losses, RAW, 1.5)
        self._line(self.smoothed, CURVE, 3.5)
        self._box(LEFT, 0, WIDTH, TOP, PAPER)  # hide the part of a diverging loss above the plot
        self._frame(title)
        self._marks()

    def x(self, rate: float) -> float:
        share = (math.log10(rate) - self.lowest) / (self.highest - self.lowest)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        share = (min(loss, 2 * self.top - self.bottom) - self.bottom) / (self.top - self.bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _grid(self) -> None:
        right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
        if self.curve.diverged is not None:
            self._box(self.x(self.curve.minimum), TOP, right, floor, LOST)
        for exponent in range(math.ceil(self.lowest - 1e-9), math.floor(self.highest + 1e-9) + 1):
            self._stroke([(self.x(10.0**exponent), TOP), (self.x(10.0**exponent), floor)], GRID, 1)
            self._text(self.x(10.0**exponent), floor + 28, f"1e{exponent}", 18, SOFT, "ms")
        for tick in nice_ticks(self.bottom, self.top):
            self._stroke([(LEFT, self.y(tick)), (right, self.y(tick))], GRID, 1)
            self._text(LEFT - 12, self.y(tick) + 6, f"{tick:.10g}", 18, SOFT, "rs")
        self._stroke([(LEFT, floor), (right, floor)], INK, 1.5)

    def _frame(self, title: str) -> None:
        x = float(WIDTH - RIGHT)
        if self.curve.diverged is not None and x - self.x(self.curve.minimum) > 130:
            self._text(x - 10, HEIGHT - BOTTOM - 12, "the loss rises", 18, LOST_INK, "rs")
        self._text(LEFT, 48, title, 28, INK, "ls")
        self._text((LEFT + x) / 2, HEIGHT - 22, "learning rate", 20, INK, "ms")
        self._text(LEFT, TOP - 14, "loss", 20, INK, "ls")
        for label, color, width in (("smoothed", CURVE, 3.5), ("of each update", RAW, 1.5)):
            x -= self._length(label, 18)
            self._text(x, TOP - 14, label, 18, SOFT, "ls")
            self._stroke([(x - 34, TOP - 20), (x - 8, TOP - 20)], color, width)
            x -= 58

    def _marks(self) -> None:
        curve = self.curve
        for label, rate in (("valley", curve.valley), ("steepest", curve.steepest), ("minimum", curve.minimum)):
            self._dot(rate, label, OTHER, 6)
        pick = curve.suggestion
        if self.lowest <= math.log10(pick) <= self.highest:
            x, floor = self.x(pick), HEIGHT - BOTTOM
            for top in range(TOP, floor, 14):
                self._stroke([(x, top), (x, min(top + 8, floor))], PICK, 2)
            self._dot(pick, "", PICK, 9)
            side, anchor = (-12, "rs") if x > WIDTH / 2 else (12, "ls")
            self._text(x + side, TOP + 30, f"suggestion {rate_text(pick)}", 22, PICK, anchor)

    def _dot(self, rate: float, label: str, color: str, radius: float) -> None:
        x, y = self.x(rate), self.y(self._smoothed_at(rate))
        self.pen.ellipse(
            _big(x - radius, y - radius, x + radius, y + radius), fill=color, outline=PAPER, width=2 * SCALE
        )
        if label:  # space is free below and to the left of a falling curve
            self._text(x - radius, y + radius + 14, label, 16, SOFT, "rs")

    def _smoothed_at(self, rate: float) -> float:
        rates = self.curve.rates
        i = min(max(bisect.bisect_left(rates, rate), 1), len(rates) - 1)
        if i < 1:
            return self.smoothed[0]
        share = math.log(rate / rates[i - 1]) / math.log(rates[i] / rates[i - 1])
        return self.smoothed[i - 1] + min(max(share, 0.0), 1.0) * (self.smoothed[i] - self.smoothed[i - 1])

    # -- strokes ------------------------------------------------------------------------------------------------------

    def _line(self, losses: Sequence[float], color: str, width: float) -> None:
        self._stroke([(self.x(r), self.y(v)) for r, v in zip(self.curve.rates, losses, strict=True)], color, width)


def shown_range(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float]:
    """Return the (lowest, highest) loss to show: the whole fall, and only the beginning of a divergence."""
    lowest, start = min(min(losses), min(smoothed)), max(losses[: max(1, len(losses) // 10)])
    fall = max(start - lowest, 1e-12, 1e-3 * abs(start))
    highest = min(max(losses), start + 0.35 * fall)
    room = 0.06 * max(highest - lowest, fall)
    return lowest - 2 * room, highest + room


def _big(*numbers: float) -> list[float]:
    return [number * SCALE for number in numbers]


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size * SCALE)
