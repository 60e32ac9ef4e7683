"""The memory timeline: bytes in use over the recorded window, as a picture and as a track of the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from forge.util.text import format_bytes
from forge_plugins.profiler.trace import BACKWARD, DATA, EVALUATION, FORWARD, STEP, TRANSFER, Trace

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1200, 360, 90, 40, 30
COLOURS = {
    DATA: "#bdbdbd",
    TRANSFER: "#ffe082",
    FORWARD: "#a5d6a7",
    BACKWARD: "#90caf9",
    STEP: "#ffab91",
    EVALUATION: "#ce93d8",
}

Points = Sequence[tuple[float, int]]


def points_of(trace: Trace, kind: str, index: int | None) -> list[tuple[float, int]]:
    """Return (time, bytes in use) on a device; on the cpu relative to the beginning of the recording."""
    return sorted(trace.memory.get((1 if kind == "cuda" else 0, index or 0), []))


def counters(points: Points, events: Sequence[Any], begin: float, name: str) -> list[dict[str, Any]]:
    """Return the points as a counter track of the trace."""
    process = next((event["pid"] for event in events if event.get("cat") == "user_annotation"), 0)
    return [
        {"ph": "C", "name": name, "pid": process, "ts": (begin + at) * 1e6, "args": {"bytes": size}}
        for at, size in points
    ]


def picture(points: Points, ranges: Sequence[tuple[str, float, float]], title: str) -> str:
    """Return an SVG of the curve over the phases of an update, with its peak."""
    seconds = max([points[-1][0], *(end for _, _, end in ranges)])
    low, high = min(0, *(size for _, size in points)), max(size for _, size in points)
    wide, tall = WIDTH - LEFT - 20, HEIGHT - TOP - BOTTOM

    def x(at: float) -> float:
        return round(LEFT + wide * min(max(at / seconds, 0.0), 1.0), 1)

    def y(size: float) -> float:
        return round(TOP + tall * (1 - (size - low) / max(high - low, 1)), 1)

    peak = max(points, key=lambda point: point[1])
    drawn = [
        f'<rect x="{x(start)}" y="{TOP}" width="{max(x(end) - x(start), 0.5):.1f}" height="{tall}" '
        f'fill="{COLOURS[name]}" opacity="0.45"><title>{escape(name)}</title></rect>'
        for name, start, end in ranges
        if name in COLOURS
    ]
    drawn += [_text(LEFT - 6, y(size) + 4, format_bytes(size), "end") for size in {low, high}]
    drawn += [_text(LEFT, HEIGHT - 10, "0 ms"), _text(LEFT + wide, HEIGHT - 10, f"{seconds * 1e3:.4g} ms", "end")]
    drawn += [_text(LEFT, 22, title)]
    at = LEFT + wide
    for name in reversed(COLOURS):
        drawn.append(_text(at, 22, name, "end"))
        drawn.append(f'<rect x="{at - 7 * len(name) - 16}" y="12" width="11" height="11" fill="{COLOURS[name]}"/>')
        at -= 7 * len(name) + 30
    steps = " ".join(_steps(thinned(points, seconds, wide), x, y))
    drawn.append(f'<path d="{steps}" fill="none" stroke="#c62828" stroke-width="1.2"/>')
    drawn.append(f'<circle cx="{x(peak[0])}" cy="{y(peak[1])}" r="3" fill="#c62828"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="monospace" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def thinned(points: Points, seconds: float, columns: int) -> list[tuple[float, int]]:
    """Return at most the lowest and highest point of each column: a small picture that keeps its peaks."""
    held: dict[int, list[tuple[float, int]]] = {}
    for point in points:
        column = held.setdefault(int(columns * point[0] / seconds), [])
        column.append(point)
        if len(column) > 2:
            lowest, highest = min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])
            column[:] = sorted({lowest, highest})
    return [point for column in sorted(held) for point in held[column]]


def _steps(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> Iterable[str]:
    """Yield path commands of a step curve: memory is constant between changes."""
    yield f"M{x(points[0][0])} {y(points[0][1])}"
    for at, size in points[1:]:
        yield f"H{x(at)} V{y(size)}"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
