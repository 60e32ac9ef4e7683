"""Runs by the names that people give them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from forge.errors import ForgeError, did_you_mean
from forge.runs.folder import Run, find_runs
from forge.util.text import short_path

RUNS = "runs"
"""Where runs are written unless one says otherwise."""


def runs_in(folder: str | Path) -> list[Run]:
    """Every run below a folder, newest first."""
    return sorted(map(Run, find_runs(Path(folder))), key=lambda run: (run.started, run.name), reverse=True)


def label(run: Run) -> str:
    """What to type for a run: its path, without the folder where runs are looked for anyway."""
    return short_path(run.path).removeprefix(f"{RUNS}/")


def locate(name: str) -> Run:
    """The run that a name stands for: its folder, a folder of runs (its newest), or a part of its name under runs/."""
    there = runs_in(name) if Path(name).is_dir() else []
    if there:
        return there[0]
    known = runs_in(RUNS)
    exact = [run for run in known if name in (label(run), run.name, run.path.name)]
    found = exact or [run for run in known if name and name in run.name]
    if len(found) > 1:
        listed = ", ".join(map(label, found[:5])) + (", ..." if len(found) > 5 else "")
        raise ForgeError(f"{name!r} stands for {len(found)} runs: {listed}. Write more of the name.")
    if found:
        return found[0]
    if Path(name).exists():
        raise ForgeError(f"{name!r} holds no run: a run folder has a card.json or a metrics.jsonl.")
    raise ForgeError(f"There is no run {name!r}.{_nearby(name, known) or f' There are none under {RUNS}/ at all.'}")


def _nearby(name: str, known: Sequence[Run]) -> str:
    """The run that was meant, whether its folder or its group too was written, else the newest ones."""
    labels = {key: label(run) for run in reversed(known) for key in (label(run), run.path.name)}
    close = get_close_matches(name.removeprefix(f"{RUNS}/"), labels, n=1)
    return f" Did you mean {labels[close[0]]!r}?" if close else did_you_mean("", map(label, known[:20]))
