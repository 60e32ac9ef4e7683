"""Build the HTML page of a sweep: parallel coordinates, importance, trials and the best recipe. It runs no script."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from forge.report.page import template
from forge.report.svg import STYLE, line_chart
from forge.runs import wording
from forge.version import __version__
from forge_sweep.parallel import bars, parallel_coordinates

MOST_TRIALS = 500
"""Rows of the table of trials."""


@dataclass(frozen=True, slots=True)
class TrialLine:
    """One trial, as plain data."""

    number: int
    state: str
    params: Mapping[str, Any]
    value: float | None
    reason: str
    seconds: float
    folder: str


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """What the page shows."""

    name: str
    metric: str
    mode: str
    how: str
    options: Mapping[str, str]
    "The range of each option, as it was written."
    logs: frozenset[str]
    "Options whose range is logarithmic."
    trials: Sequence[TrialLine]
    best: int | None
    importance: Mapping[str, float]
    recipe: str


def sweep_page(sweep: SweepSummary) -> str:
    """Render the whole document."""
    best = next((trial for trial in sweep.trials if trial.number == sweep.best), None)
    return template(Path(__file__).with_name("sweep.html")).render(
        sweep=sweep,
        chart_style=Markup(STYLE),
        tiles=tiles(sweep, best),
        coordinates=Markup(coordinates(sweep)),
        history=Markup(history(sweep)),
        importance=Markup(bars(dict(sweep.importance), f"Importance for {sweep.metric}")) if sweep.importance else "",
        rows=rows(sweep),
        more=max(0, len(sweep.trials) - MOST_TRIALS),
        heads=["trial", "", sweep.metric, *sweep.options, "time", "reason"],
        version=__version__,
        now=time.strftime("%Y-%m-%d %H:%M"),
    )


def tiles(sweep: SweepSummary, best: TrialLine | None) -> dict[str, str]:
    """Return the figures at the top of the page, by label."""
    states = [trial.state for trial in sweep.trials]
    found = {"trials": str(len(states))}
    found |= {state: str(states.count(state)) for state in ("pruned", "failed", "running") if state in states}
    if best is not None:
        found |= {f"best {sweep.metric}": wording.number(best.value)}
        found |= {key: wording.value_text(_short(value)) for key, value in best.params.items()}
    return {**found, "time of all trials": wording.duration(sum(trial.seconds for trial in sweep.trials))}


def coordinates(sweep: SweepSummary) -> str:
    """Draw every trial that has a value across its options."""
    shown = [trial for trial in sweep.trials if _has_value(trial) and sweep.options.keys() <= trial.params.keys()]
    lines = [({**trial.params, sweep.metric: trial.value}, f"trial {trial.number}", trial.number) for trial in shown]
    axes = [*sweep.options, sweep.metric]
    return parallel_coordinates(lines, axes, sweep.logs, best=sweep.best, smaller_is_better=sweep.mode == "min")


def history(sweep: SweepSummary) -> str:
    """Draw the best value so far over trials."""
    better = max if sweep.mode == "max" else min
    values = [(trial.number, trial.value) for trial in sweep.trials if _has_value(trial) and trial.state == "complete"]
    so_far: list[tuple[float, float]] = []
    for number, value in values:
        assert value is not None
        so_far.append((number, better(value, so_far[-1][1]) if so_far else value))
    every = [(float(number), float(value)) for number, value in values if value is not None]
    return line_chart({"best so far": so_far, "each trial": every}, f"{sweep.metric} by trial", x_label="trial")


def rows(sweep: SweepSummary) -> list[dict[str, Any]]:
    """Return the trials for the table, the best first."""
    sign = -1.0 if sweep.mode == "max" else 1.0

    def rank(trial: TrialLine) -> tuple[bool, bool, float, int]:
        value = trial.value if _has_value(trial) and trial.value is not None else 0.0
        return trial.state != "complete", not _has_value(trial), sign * value, trial.number

    return [
        {
            "folder": trial.folder,
            "state": trial.state,
            "best": trial.number == sweep.best,
            "cells": [
                wording.number(trial.value) if trial.value is not None else "",
                *(
                    wording.value_text(_short(trial.params[key])) if key in trial.params else ""
                    for key in sweep.options
                ),
                wording.duration(trial.seconds) if trial.seconds else "",
                trial.reason,
            ],
        }
        for trial in sorted(sweep.trials, key=rank)[:MOST_TRIALS]
    ]


def _has_value(trial: TrialLine) -> bool:
    return trial.value is not None and math.isfinite(trial.value)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
