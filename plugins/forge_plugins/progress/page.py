"""Progress in a notebook: a bar, a table of metrics and their curves, redrawn in the cell's output."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterable
from typing import Any

import forge
from forge.runs.directions import metric_rank, told_once
from forge.util.text import short_path
from forge_plugins.progress.reading import clock, epoch_of, rates_of, speed_of, updates_of
from forge_plugins.progress.status import NEVER, Status

REFRESH = 0.5
"""Seconds between two redraws."""
RESULT = ("forge.engine.trainer", "FitResult")
"""The type of a fit's result, by name."""
POINTS = 400
"""The most points of a curve; with more, every second one is dropped."""
WIDTH, HEIGHT = 240, 90
"""Pixels of a curve."""
COLOURS = {"": "#2a7ade", "done": "#2e9e5b", "interrupted": "#c98a00", "failed": "#c4314b"}
STYLE = "font:13px system-ui,sans-serif;max-width:780px"
CELL = "padding:2px 14px 2px 0;text-align:left;background:none"


class Page:
    """A live display in the output of a cell; what is printed stands above or below it."""

    def __init__(self, status: Status, shell: Any):
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        self.status, self._html = status, HTML
        self.series: dict[str, list[tuple[int, float]]] = {}
        self._seen: dict[str, float] = {}
        self._next = 0.0
        shell.display_formatter.formatters["text/html"].for_type_by_name(*RESULT, result_html)
        self._handle: Any = display(HTML(self._drawn()), display_id=True)

    def look(self, step: forge.Step) -> float:
        self._note()
        if time.monotonic() >= self._next:
            self.refresh()
            self._next = time.monotonic() + REFRESH
        return self._next

    def refresh(self) -> None:
        self._handle.update(self._html(self._drawn()))

    def close(self) -> None:
        self._note()
        self.refresh()
        self._next = NEVER

    def _note(self) -> None:
        """Add what was logged since the last look to the curves."""
        for name, value in self.status.metrics.items():
            points = self.series.setdefault(name, [])
            if math.isfinite(value) and (
                not points or (self._seen.get(name) != value and points[-1][0] < self.status.update)
            ):
                points.append((self.status.update, value))
                self._seen[name] = value
                if len(points) > POINTS:
                    del points[1:-1:2]

    def _drawn(self) -> str:
        status = self.status
        share = min(status.update / status.planned, 1.0) if status.planned else float(bool(status.ending))
        parts = [
            f"<div style='{STYLE}'>",
            bar(share, COLOURS[status.ending]),
            f"<div>{html.escape(self._line())}</div>",
            f"<div style='color:gray'>{html.escape(status.opening)}</div>",
        ]
        if status.metrics:
            parts.append(metrics_table(status.all, {name: best for name, (_, best) in status.best.items()}))
        curves = [curve(name, points) for name, points in self.series.items() if len(points) > 1]
        parts.append(f"<div style='display:flex;flex-wrap:wrap;gap:12px'>{''.join(curves)}</div>")
        if status.run_dir is not None:
            parts.append(f"<div style='color:gray'>{html.escape(short_path(status.run_dir))}</div>")
        return "".join([*parts, "</div>"])

    def _line(self) -> str:
        status = self.status
        if status.verb != "fit":
            return f"{status.verb} {status.ending or status.doing} {clock(status.elapsed)}"
        left = f"{clock(status.remaining)} left" if status.remaining is not None and not status.ending else ""
        now = status.doing or (speed_of(status.average_speed, True) if status.ending else rates_of(status, wide=True))
        parts = [status.ending, epoch_of(status), f"update {updates_of(status)}", now, clock(status.elapsed), left]
        return " · ".join(filter(None, (part.strip() for part in parts)))


def bar(share: float, colour: str) -> str:
    return (
        "<div style='background:rgba(128,128,128,.25);border-radius:4px;height:8px;margin:4px 0'>"
        f"<div style='background:{colour};border-radius:4px;height:8px;width:{100 * share:.1f}%'></div></div>"
    )


def metrics_table(metrics: dict[str, float], best: dict[str, float]) -> str:
    """Return the last and the best values as a table."""
    names = sorted(told_once(metrics), key=metric_rank)
    rows = [(name, f"{metrics[name]:.5g}", f"{best[name]:.5g}" if name in best else "") for name in names]
    head = "".join(f"<th style='{CELL};font-weight:600'>{title}</th>" for title in ("metric", "last", "best"))
    return table(rows, "margin:6px 0", f"<tr>{head}</tr>")


def table(rows: Iterable[Iterable[str]], style: str, head: str = "") -> str:
    lines = ("".join(f"<td style='{CELL}'>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table style='border-collapse:collapse;{style}'>{head}{body}</table>"


def curve(name: str, points: list[tuple[int, float]]) -> str:
    """Return a metric over updates as SVG, from update 0."""
    values = [value for _, value in points]
    low, high, last = min(values), max(values), max(points[-1][0], 1)
    span = high - low or 1.0
    path = " ".join(
        f"{WIDTH * update / last:.1f},{4 + (HEIGHT - 8) * (high - value) / span:.1f}" for update, value in points
    )
    label = "style='font-size:11px;fill:gray'"
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT + 34}' role='img' aria-label='{html.escape(name, quote=True)}'>"
        f"<text x='0' y='12' style='font-size:12px;fill:currentColor'>{html.escape(name)}</text>"
        f"<g transform='translate(0 18)'><polyline points='{path}' fill='none' stroke='{COLOURS['']}'/>"
        f"<text x='0' y='{HEIGHT + 13}' {label}>0</text>"
        f"<text x='{WIDTH}' y='{HEIGHT + 13}' text-anchor='end' {label}>{last:,}</text>"
        f"</g><text x='{WIDTH}' y='12' text-anchor='end' {label}>{low:.4g} to {high:.4g}</text></svg>"
    )


def result_html(result: Any) -> str:
    """Return the result of a fit as a table."""
    interrupted = result.stop_reason.startswith("signal") and result.run_dir is not None
    more = f'; continue with forge.Trainer(run_dir={str(result.run_dir)!r}, resume="auto")' if interrupted else ""
    facts = {
        "ended": result.stop_reason + more,
        "updates": f"{result.updates:,}",
        "epochs": f"{result.epochs:,}",
        **{name: f"{result.metrics[name]:.5g}" for name in sorted(told_once(result.metrics), key=metric_rank)},
        **({"run folder": short_path(result.run_dir)} if result.run_dir is not None else {}),
    }
    return table(facts.items(), STYLE)
