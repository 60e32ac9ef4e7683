"""Draw parallel coordinates and bars as SVG: no library, no script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from forge.report.svg import LETTER, bar_chart
from forge.report.ticks import log_ticks, nice_ticks, tick_text

WIDTH, HEIGHT = 980, 380
TOP, FLOOR, LEFT, RIGHT = 56.0, 340.0, 70.0, 900.0
MOST_LINES = 1000
TicksAt = list[tuple[float, str]]
"""Heights between 0 and 1, and what is written there."""


class ParallelAxis:
    """One option: where each of its values is between 0 (bottom) and 1 (top)."""

    def __init__(self, name: str, values: Sequence[Any], is_log: bool):
        self.name = name
        numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        distinct = sorted(set(map(str, values)), key=_order)
        self.words = {} if len(numbers) == len(values) and len(distinct) > 4 else _evenly(distinct)
        self.is_log = is_log and bool(numbers) and min(numbers) > 0
        at = [self._scaled(value) for value in numbers] if not self.words else [0.0, 1.0]
        self.low, self.high = min(at, default=0.0), max(at, default=1.0)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.is_log else float(value)

    def place(self, value: Any) -> float:
        if self.words:
            return self.words[str(value)]
        return (self._scaled(value) - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def ticks(self) -> TicksAt:
        if self.words:
            return [(at, word) for word, at in self.words.items()]
        if self.high <= self.low:
            return [(0.5, tick_text(10**self.low if self.is_log else self.low))]
        found = log_ticks(10**self.low, 10**self.high) if self.is_log else nice_ticks(self.low, self.high, 5)
        return [(self.place(tick), tick_text(tick)) for tick in found if -1e-9 <= self.place(tick) <= 1 + 1e-9]


def parallel_coordinates(
    lines: Sequence[tuple[Mapping[str, Any], str, int]],
    axes: Sequence[str],
    logs: Collection[str] = (),
    best: int | None = None,
    smaller_is_better: bool = False,
) -> str:
    """Draw one line across the axes for each (values, title, number); the last axis decides how strong it is."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="forge-chart" role="img" aria-label="parallel coordinates" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    )
    if not lines:
        middle = f'x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle"'
        return f'{head}<text class="tick" {middle}>nothing to draw yet</text></svg>\n'
    drawn = [ParallelAxis(name, [values[name] for values, _, _ in lines], name in logs) for name in axes]
    gap = (RIGHT - LEFT) / max(1, len(axes) - 1)
    result, rank = drawn[-1], {}
    for place, (_, _, number) in enumerate(sorted(lines, key=lambda line: result.place(line[0][axes[-1]]))):
        share = place / max(1, len(lines) - 1)
        rank[number] = 1 - share if smaller_is_better else share
    parts = [head]
    for values, title, number in sorted(lines, key=lambda line: (line[2] == best, rank[line[2]]))[-MOST_LINES:]:
        points = [(LEFT + gap * i, _y(axis.place(values[axis.name]))) for i, axis in enumerate(drawn)]
        is_best = number == best
        look = 'stroke="var(--c1)" stroke-width="3"' if is_best else 'stroke="var(--c0)"'
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for (x, y), (to_x, to_y) in itertools.pairwise(points):
            path += f"C{(x + to_x) / 2:.1f} {y:.1f} {(x + to_x) / 2:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        told = ", ".join(f"{name} {_word(values[name])}" for name in axes)
        shade = 1.0 if is_best else 0.12 + 0.7 * rank[number] ** 2
        parts.append(
            f'<path class="curve" {look} stroke-opacity="{shade:.2f}" data-trial="{number}" d="{path}">'
            f"<title>{escape(title)}: {escape(told)}</title></path>"
        )
    for i, axis in enumerate(drawn):
        x = LEFT + gap * i
        parts.append(f'<path class="axis" d="M{x:.1f} {TOP:.1f}V{FLOOR:.1f}"/>')
        room = int(gap / LETTER) if len(axes) > 2 else 60
        parts.append(
            f'<text x="{x:.1f}" y="{TOP - 24:.1f}" text-anchor="middle">{escape(_cut(axis.name, room))}</text>'
        )
        side = ('end"', -8) if i < len(drawn) - 1 else ('start"', 8)
        for at, word in axis.ticks():
            parts.append(
                f'<text class="tick halo" x="{x + side[1]:.1f}" y="{_y(at) + 4:.1f}" text-anchor="{side[0]}>'
                f"{escape(_cut(word, 14))}</text>"
            )
            parts.append(f'<path class="axis" d="M{x - 3:.1f} {_y(at):.1f}h6"/>')
    note = "The best trial is orange; of the others, the better, the stronger."
    parts.append(f'<text class="tick" x="{LEFT:.1f}" y="{HEIGHT - 12}">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def bars(shares: Mapping[str, float], title: str) -> str:
    """Draw shares of one as horizontal bars, the largest first."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return bar_chart([(name, share, f"{share:.0%}", 0) for name, share in ordered], title, most=1.0)


def _y(place: float) -> float:
    return FLOOR - place * (FLOOR - TOP)


def _evenly(words: Sequence[str]) -> dict[str, float]:
    return {word: i / (len(words) - 1) if len(words) > 1 else 0.5 for i, word in enumerate(words)}


def _order(word: str) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    try:
        return False, float(word), word
    except ValueError:
        return True, 0.0, word


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: max(1, most - 1)]}…"
