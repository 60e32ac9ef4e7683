"""Find runs by name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from forge.errors import ForgeError, did_you_mean
from forge.runs.folder import RunFolder, find_runs, is_group, is_run
from forge.runs.group import RunGroup
from forge.util.text import short_path

RUNS = "runs"
"""The default folder of runs."""


def runs_in(folder: str | Path) -> list[RunFolder]:
    """Return every run below a folder, newest first."""
    return sorted(map(RunFolder, find_runs(Path(folder))), key=lambda run: (run.started, run.name), reverse=True)


def rows_in(folder: str | Path) -> list[RunFolder]:
    """Return every run below a folder, newest first; runs that belong together are one `RunGroup`."""
    rows: dict[Path, RunFolder] = {}
    for run in runs_in(folder):
        home = run.path.parent
        rows.setdefault(home, RunGroup(home)) if is_group(home) else rows.setdefault(run.path, run)
    return list(rows.values())


def label(run: RunFolder) -> str:
    """Return a short name that `locate` finds: the path without the folder of runs."""
    return short_path(run.path).removeprefix(f"{RUNS}/")


def locate(name: str) -> RunFolder:
    """Find a run, or a group, by its folder, a folder of runs (its newest), or a part of its name under runs/."""
    there = rows_in(name) if Path(name).is_dir() else []
    if there:
        return RunFolder(name) if is_run(Path(name)) else there[0]
    rows = rows_in(RUNS)
    known = [*rows, *(run for row in rows if isinstance(row, RunGroup) for run in row.runs)]
    exact = [run for run in known if name in (label(run), run.name, run.path.name)]
    found = exact or [run for run in known if name and name in run.name]
    found = [run for run in found if not any(run.path.parent == row.path for row in found)]
    if len(found) > 1:
        listed = ", ".join(map(label, found[:5])) + (", ..." if len(found) > 5 else "")
        raise ForgeError(f"{name!r} matches {len(found)} runs: {listed}. Write more of the name.")
    if found:
        return found[0]
    if Path(name).exists():
        raise ForgeError(f"{name!r} holds no run: a run folder has a card.json or a metrics.jsonl.")
    raise ForgeError(f"There is no run {name!r}.{_nearby(name, known) or f' There are none under {RUNS}/ at all.'}")


def _nearby(name: str, known: Sequence[RunFolder]) -> str:
    """Suggest the run with the closest name, with or without its group, else the newest runs."""
    labels = {key: label(run) for run in reversed(known) for key in (label(run), run.path.name)}
    close = get_close_matches(name.removeprefix(f"{RUNS}/"), labels, n=1)
    return f" Did you mean {labels[close[0]]!r}?" if close else did_you_mean("", map(label, known[:20]))
