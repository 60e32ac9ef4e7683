"""Draw curves as SVG: no library, no script, readable on light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from forge.report.ticks import SMALLEST, log_ticks, nice_ticks, tick_text

Point = tuple[float, float]
Look = tuple[int, int]
"""The number of a colour, and of a dash pattern (0: solid)."""

Band = Sequence[tuple[float, float, float]]
"""(x, low, high) of a group of runs around its mean."""

COLORS = 8
"""Colours that colour-blind readers can tell apart too: a test simulates what they see. Further series repeat them,
dashed."""
DASHES = ("", "6 4", "2 4", "9 3 2 3")
STYLE = """
.forge-chart{background:#fff;color:#1f2933;font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
max-width:100%;height:auto}
.forge-chart,.keys{--c0:#0b4fb3;--c1:#b5330a;--c2:#12b877;--c3:#cd94c6;--c4:#e79400;--c5:#8f8cf5;--c6:#6f3b62;
--c7:#101010}
@media (prefers-color-scheme:dark){.forge-chart{background:#171a1f;color:#e4e7eb}
.forge-chart,.keys{--c0:#3f8ffb;--c1:#e0452c;--c2:#35e08f;--c3:#d9b3ff;--c4:#ffb02e;--c5:#a05aa8;--c6:#c04a63;
--c7:#e6f5f2}}
.forge-chart text{fill:currentColor;stroke:none}
.forge-chart .tick{opacity:.7}
.forge-chart .title{font-size:14px;font-weight:600}
.forge-chart .grid{stroke:currentColor;stroke-opacity:.13;fill:none}
.forge-chart .axis{stroke:currentColor;stroke-opacity:.5;fill:none}
.forge-chart .band{stroke:none;opacity:.2}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.forge-chart .at rect{fill:transparent}
.forge-chart .at g{visibility:hidden;pointer-events:none}
.forge-chart .at:hover g{visibility:visible}
.forge-chart .at .tip{fill:#fff;stroke:currentColor;stroke-opacity:.3}
@media (prefers-color-scheme:dark){.forge-chart .at .tip{fill:#171a1f}}
.forge-chart .lost{stroke:#d64545;stroke-width:1.6;fill:none}
""".replace("\n", "")
LETTER = 6.4
"""The approximate width of a letter."""
MOST_POINTS = 2000
"""A longer series is thinned to the extremes of every stretch."""
MOST_DOTS = 40
"""Up to this many points have a dot, with a tooltip of the value."""
MOST_LOST = 40
MOST_COLUMNS = 40
"""Places at which a page tells the values of all curves, to who points there."""


def line_chart(
    series: Mapping[str, Sequence[Point]],
    title: str = "",
    x_label: str = "update",
    y_label: str = "",
    width: int = 640,
    height: int = 320,
    log_y: bool = False,
) -> str:
    """Draw curves by name as one `<svg>`, for a page or a file.

    A value that is not finite leaves a gap and a small red cross on the axis; with `log_y`, so does one that is not
    positive. Each curve's `data-points` holds its points exactly, as `x,y x,y ...`.
    """
    return Chart(series, title, x_label, y_label, width, height, log_y).draw()


class Chart:
    """One chart; `x` and `y` convert values to coordinates."""

    def __init__(
        self,
        series: Mapping[str, Sequence[Point]],
        title: str,
        x_label: str,
        y_label: str,
        width: int,
        height: int,
        log_y: bool,
        looks: Sequence[Look] = (),
        bands: Mapping[str, Band] | None = None,
        on_page: bool = False,
        log_x: bool = False,
    ):
        """`bands` are drawn behind the curves of their names. On a page, title and legend stand beside the chart
        (`entries`), and the values are told where one points."""
        self.bands, self.on_page, self.log_x = bands or {}, on_page, log_x
        self.looks = looks or [(i, i // COLORS) for i in range(len(series))]
        self.series, self.title, self.width, self.height = series, title, width, height
        self.x_label, self.y_label = x_label, y_label
        edges = [(x, y) for band in self.bands.values() for x, low, high in band for y in (low, high)]
        shown = [point for points in (*series.values(), edges) for point in points if _is_finite(point)]
        self.log_y = log_y and any(y > 0 for _, y in shown)
        if self.log_y:
            shown = [(x, y) for x, y in shown if y > 0]
        self.empty = not shown
        self.left_x, self.right_x = _spread([math.log10(x) if log_x else x for x, _ in shown], 0.0)
        if self.left_x > 0 and not log_x:
            self.left_x = 0.0  # training begins there, also where its first points were not logged
        self.bottom_y, self.top_y = _spread([math.log10(y) if self.log_y else y for _, y in shown], 0.05)
        self.x_ticks = [] if self.empty else nice_ticks(self.left_x, self.right_x, max(3, width // 70))
        if log_x and not self.empty:
            self.x_ticks = log_ticks(10**self.left_x, 10**self.right_x)
        if self.log_y:
            self.y_ticks = log_ticks(10 ** max(self.bottom_y, -300), 10 ** min(self.top_y, 300))
        else:
            self.y_ticks = nice_ticks(self.bottom_y, self.top_y, max(4, height // 45))
        self.legend = [] if on_page else list(self._legend())
        titled = bool(title) and not on_page
        if self.legend:  # many curves must not leave less room for themselves
            self.height = height = height + 18 * max(0, self.legend[-1][1] - 1)
        self.top = 14.0 + 22 * titled + (18 * (1 + self.legend[-1][1]) if self.legend else 0) + 14 * bool(y_label)
        self.floor = height - (40.0 if x_label else 26.0)
        longest = max((len(tick_text(tick)) for tick in self.y_ticks), default=1)
        self.left, self.right = 14 + LETTER * (longest + 1), width - 18.0

    def _legend(self) -> Iterator[tuple[str, int, float]]:
        """Yield (name, line, x) of every entry, as many on a line as fit."""
        x, line = 14.0, 0
        if len(self.series) == 1 and next(iter(self.series)) in (self.title, self.y_label):
            return
        for name in self.series:
            room = 30 + LETTER * len(_short(name)) + 16
            if x > 14 and x + room > self.width:
                x, line = 14.0, line + 1
            yield name, line, x
            x += room

    def x(self, value: float) -> float:
        at = math.log10(value) if self.log_x else value
        return self.left + (at - self.left_x) / (self.right_x - self.left_x) * (self.right - self.left)

    def y(self, value: float) -> float:
        at = math.log10(value) if self.log_y else value
        return self.floor - (at - self.bottom_y) / (self.top_y - self.bottom_y) * (self.floor - self.top)

    # -- parts --------------------------------------------------------------------------------------------------------

    def draw(self, styled: bool = True) -> str:
        """Return the SVG, without STYLE if the page already has it."""
        name = _text(self.title or ", ".join(self.series) or "chart")
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="forge-chart" role="img" aria-label="{name}" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}">'
        )
        parts = [head, *[f"<style>{STYLE}</style>"] * styled, *self._words(), *self._axes()]
        for i, (label, points) in enumerate(self.series.items()):
            drawn = "".join([*self._band(i, self.bands.get(label, ())), *self._curve(i, points)])
            parts.append(f'<g class="s{i}">{drawn}</g>' if self.on_page else drawn)
        told = self._columns() if self.on_page and not self.empty else ()
        return "\n".join([*parts, *self._lost(), *told, "</svg>"]) + "\n"

    def entries(self) -> list[tuple[str, str]]:
        """Return the legend of a chart on a page: each curve's name, and how it looks."""
        if len(self.series) == 1 and next(iter(self.series)) in (self.title, self.y_label):
            return []
        return [(name, _stroke(look)) for name, look in zip(self.series, self.looks, strict=True)]

    def _band(self, index: int, band: Band) -> Iterator[str]:
        edges = [at for at in band if self._is_shown((at[0], at[1])) and self._is_shown((at[0], at[2]))]
        if len(edges) > 1:
            edges = (
                [edges[i * (len(edges) - 1) // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]
                if (len(edges) > MOST_POINTS)
                else edges
            )
            around = [(x, high) for x, _, high in edges] + [(x, low) for x, low, _ in reversed(edges)]
            path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in around)
            yield f'<path class="band" fill="var(--c{self.looks[index][0] % COLORS})" d="M{path}Z"/>'

    def _columns(self) -> Iterator[str]:
        """Yield strips of the chart, each with the values of all curves, which a browser shows where one points."""
        known = [dict(point for point in points if self._is_shown(point)) for points in self.series.values()]
        every = sorted({x for points in known for x in points})
        places = (
            [every[i * len(every) // MOST_COLUMNS] for i in range(MOST_COLUMNS)] if len(every) > MOST_COLUMNS else every
        )
        edges = [self.left, *((self.x(a) + self.x(b)) / 2 for a, b in pairwise(places)), self.right]
        spread = [{x: (high - low) / 2 for x, low, high in self.bands.get(name, ())} for name in self.series]
        for place, (start, end) in zip(places, pairwise(edges), strict=True):
            told = [
                (i, f"{name} {_value(points[place])}{f' ± {_value(off[place])}' if place in off else ''}")
                for i, (name, points, off) in enumerate(zip(map(_short, self.series), known, spread, strict=True))
                if place in points
            ]
            head = f"{self.x_label or 'at'} {place:.10g}"
            width = 22 + LETTER * max(len(head), *(len(text) + 2 for _, text in told))
            at = self.x(place)
            left = min(max(at + 8 if at + 8 + width <= self.width else at - 8 - width, 0), max(0, self.width - width))
            lines = [f'<text x="{left + 9:.0f}" y="{self.top + 17:.0f}">{_text(head)}</text>']
            for row, (i, text) in enumerate(told, 1):
                y = self.top + 17 + 16 * row
                lines.append(
                    f'<g class="s{i}"><circle cx="{left + 13:.0f}" cy="{y - 4:.0f}" r="4" '
                    f'fill="var(--c{self.looks[i][0] % COLORS})"/><text x="{left + 22:.0f}" y="{y:.0f}">{_text(text)}'
                    "</text></g>"
                )
            yield (
                f'<g class="at"><rect x="{start:.1f}" y="{self.top:.0f}" width="{max(0.1, end - start):.1f}" '
                f'height="{self.floor - self.top:.0f}"/><g><path class="axis" d="M{at:.1f} {self.top:.0f}V'
                f'{self.floor:.0f}"/><rect class="tip" x="{left:.0f}" y="{self.top:.0f}" width="{width:.0f}" '
                f'height="{16 * len(told) + 26}" rx="5"/>{"".join(lines)}</g></g>'
            )

    def _words(self) -> Iterator[str]:
        top = 14.0
        if self.title and not self.on_page:
            room = int((self.width - 28) / (LETTER * 1.25))
            yield f'<text class="title" x="14" y="24">{_text(_short(self.title, room))}</text>'
            top += 22
        for i, (name, line, x) in enumerate(self.legend):
            y = top + 18 * line + 6
            yield f'<path class="curve" {_stroke(self.looks[i])} d="M{x:.1f} {y:.1f}h20"/>'
            yield f'<text x="{x + 26:.1f}" y="{y + 4:.1f}">{_text(_short(name))}</text>'
        if self.y_label and self.y_label != self.title:
            yield f'<text class="tick" x="14" y="{self.top - 8:.1f}">{_text(self.y_label)}</text>'
        if self.x_label:
            middle = (self.left + self.right) / 2
            y = self.height - 8
            yield f'<text class="tick" x="{middle:.1f}" y="{y}" text-anchor="middle">{_text(self.x_label)}</text>'

    def _axes(self) -> Iterator[str]:
        lines = [f"M{self.left:.1f} {self.y(tick):.1f}H{self.right:.1f}" for tick in self.y_ticks]
        lines += [f"M{self.x(tick):.1f} {self.top:.1f}V{self.floor:.1f}" for tick in self.x_ticks]
        if lines:
            yield f'<path class="grid" d="{"".join(lines)}"/>'
        yield f'<path class="axis" d="M{self.left:.1f} {self.floor:.1f}H{self.right:.1f}"/>'
        for tick in [] if self.empty else self.y_ticks:
            yield (
                f'<text class="tick" x="{self.left - 7:.1f}" y="{self.y(tick) + 4:.1f}" text-anchor="end">'
                f"{tick_text(tick)}</text>"
            )
        for tick in self.x_ticks:
            yield (
                f'<text class="tick" x="{self.x(tick):.1f}" y="{self.floor + 17:.1f}" text-anchor="middle">'
                f"{tick_text(tick)}</text>"
            )
        if self.empty:
            middle = f'x="{self.width / 2:.1f}" y="{(self.top + self.floor) / 2:.1f}"'
            yield f'<text class="tick" {middle} text-anchor="middle">nothing to draw yet</text>'

    def _curve(self, index: int, points: Sequence[Point]) -> Iterator[str]:
        name = _text(list(self.series)[index])
        given = " ".join(f"{_exact(x)},{_exact(y)}" for x, y in points if _is_finite((x, y)))
        runs = [thinned(run, MOST_POINTS) for run in self._runs(points)]
        path = "".join("M" + "L".join(f"{self.x(x):.2f} {self.y(y):.2f}" for x, y in run) for run in runs)
        yield f'<path class="curve" {_stroke(self.looks[index])} data-name="{name}" data-points="{given}" d="{path}"/>'
        few = sum(map(len, runs)) <= MOST_DOTS
        for run in runs:
            for x, y in run if few or len(run) == 1 else ():
                at = f'cx="{self.x(x):.2f}" cy="{self.y(y):.2f}" r="{3.2 if len(run) == 1 else 2.4}"'
                value = "" if self.on_page else f"<title>{name}: {y:.6g} at {x:.10g}</title>"
                yield f'<circle fill="var(--c{self.looks[index][0] % COLORS})" {at}>{value}</circle>'

    def _runs(self, points: Sequence[Point]) -> Iterator[list[Point]]:
        """Yield stretches without a gap."""
        run: list[Point] = []
        for point in points:
            if self._is_shown(point):
                run.append(point)
            elif run:
                yield run
                run = []
        if run:
            yield run

    def _lost(self) -> Iterator[str]:
        """Yield crosses on the axis for values that cannot be drawn."""
        crosses = 0
        for name, points in self.series.items():
            for x, y in points:
                if self.empty or self._is_shown((x, y)) or not math.isfinite(x) or crosses == MOST_LOST:
                    continue
                crosses += 1
                at = min(max(self.x(x), self.left), self.right)
                yield (
                    f'<path class="lost" d="M{at - 3:.1f} {self.floor - 3:.1f}l6 6m0 -6l-6 6">'
                    f"<title>{_text(name)}: {y:g} at {x:.10g}</title></path>"
                )

    def _is_shown(self, point: Point) -> bool:
        return _is_finite(point) and (point[1] > 0 or not self.log_y)


def write_svg(path: str | Path, drawn: str) -> Path:
    """Write a drawing, in a file whose name ends in .svg, and return its path."""
    path = Path(path).with_suffix(".svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn, encoding="utf-8")
    return path


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most `most` points: both ends, and the lowest and highest of every stretch."""
    if len(points) <= most:
        return points
    inner = points[1:-1]
    count = (most - 2) // 2
    kept = [points[0]]
    for i in range(count):
        stretch = inner[i * len(inner) // count : (i + 1) * len(inner) // count]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return [*kept, points[-1]]


def _spread(values: Sequence[float], room: float) -> tuple[float, float]:
    """Return (lowest, highest) with a margin, never equal."""
    if not values:
        return 0.0, 1.0
    lowest, highest = min(values), max(values)
    if not highest - lowest > max(1e-9 * max(abs(lowest), abs(highest)), 1e3 * SMALLEST):
        around = abs(lowest) * 0.1
        around = around if around > 1e3 * SMALLEST else 0.5
        return lowest - around, highest + around
    more = room * (highest - lowest)
    return lowest - more, highest + more


def _stroke(look: Look) -> str:
    color, dashes = look
    dash = DASHES[dashes % len(DASHES)]
    return f'stroke="var(--c{color % COLORS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _value(value: float) -> str:
    return f"{value:.4g}"


def _exact(value: float) -> str:
    return repr(int(value) if isinstance(value, int) else float(value))


def _text(text: str) -> str:
    """Escape text for an element or an attribute; drop characters that XML cannot hold."""
    return escape("".join(letter for letter in text if letter.isprintable()))


def _short(text: str, most: int = 48) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _is_finite(point: Point) -> bool:
    """Whether a point can be drawn: arithmetic with it must not overflow either."""
    return math.isfinite(point[0]) and abs(point[0]) < 1e300 and math.isfinite(point[1]) and abs(point[1]) < 1e300
