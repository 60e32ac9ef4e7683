"""Runs by the names that people give them."""

from __future__ import annotations

from pathlib import Path

from forge.errors import ForgeError, did_you_mean
from forge.report.folder import Run, find_runs

RUNS = "runs"
"""Where runs are written unless one says otherwise."""


def runs_in(folder: str | Path) -> list[Run]:
    """Every run below a folder, newest first."""
    return sorted(map(Run, find_runs(Path(folder))), key=lambda run: (run.started, run.name), reverse=True)


def locate(name: str) -> Run:
    """The run that a name stands for: its folder, a folder of runs (its newest), or a part of its name under runs/."""
    there = runs_in(name) if Path(name).is_dir() else []
    if there:
        return there[0]
    known = runs_in(RUNS)
    exact = [run for run in known if name in (run.name, run.path.name)]
    near = exact or [run for run in known if name and name in run.name]
    if len(near) > 1:
        listed = ", ".join(run.name for run in near[:5]) + (", ..." if len(near) > 5 else "")
        raise ForgeError(f"{name!r} stands for {len(near)} runs: {listed}. Write more of the name.")
    if near:
        return near[0]
    if Path(name).exists():
        raise ForgeError(f"{name!r} holds no run: a run folder has a card.json or a metrics.jsonl.")
    hint = did_you_mean(name, [run.name for run in known[:20]])
    raise ForgeError(f"There is no run {name!r}.{hint or f' There are none under {RUNS}/ at all.'}")
