"""Compare runs: recipe, result and surroundings as flat values by dotted name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge.runs.attempts import attempts_of, changed_setup, commands
from forge.runs.directions import best_of, metric_rank, mode_of
from forge.runs.folder import RunFolder, as_dict, recipe_section
from forge.runs.group import RunGroup, merged, spreads

Rows = dict[str, list[Any]]
KEPT = ("rates/samples_per_s", "rates/tokens_per_s", "rates/peak_gb")
"""Metrics of plugins that count as results."""


def compare(runs: Sequence[RunFolder]) -> dict[str, Rows]:
    """Return the differences between runs, in three parts; None for a missing value. Results are complete."""
    return {
        "recipe": only_names(differing(runs, settings)),
        "result": rows(runs, results),
        "surroundings": differing(runs, surroundings),
    }


def rows(runs: Sequence[RunFolder], read: Callable[[RunFolder], dict[str, Any]]) -> Rows:
    by_run = [read(run) for run in runs]
    keys = dict.fromkeys(key for values in by_run for key in values)
    return {key: [values.get(key) for values in by_run] for key in keys}


def differing(runs: Sequence[RunFolder], read: Callable[[RunFolder], dict[str, Any]]) -> Rows:
    return {key: values for key, values in rows(runs, read).items() if any(value != values[0] for value in values)}


def settings(run: RunFolder) -> dict[str, Any]:
    """Return the recipe with all defaults: the card has every option of task, trainer and plugins."""
    if isinstance(run, RunGroup):
        return merged([settings(each) for each in run.runs])
    card = run.card
    task = as_dict(card.get("task"))
    found = {"recipe": card.get("recipe"), "task": task.get("class"), **_flat(as_dict(task.get("options")), "task")}
    found |= _flat(recipe_section(run, "data"), "data")
    found |= _flat(as_dict(card.get("trainer")), "trainer")
    found |= _flat(as_dict(card.get("optimizers")), "")
    for plugin in run.stack:
        name = str(plugin.get("name"))
        found |= {f"plugin {name}": "yes", **_flat(as_dict(plugin.get("options")), name)}
    return found | {"order of plugins": ", ".join(str(plugin.get("name")) for plugin in run.stack)}


def results(run: RunFolder) -> dict[str, Any]:
    """Return counters, time, and every metric's last and best value."""
    found: dict[str, Any] = {
        "status": run.status,
        "updates": run.updates,
        "epochs": run.epochs,
        "seconds": round(run.seconds, 3),
        "samples/s": run.rate,
    }
    best = bests(run)
    for name in metrics_of(run):
        found[name] = run.final[name]
        if name in best:
            found[f"best {name}"] = best[name][1]
    return found


def metrics_of(run: RunFolder) -> list[str]:
    """Return the names of metrics that are results, sorted; those that plugins log about themselves are not."""
    plugins = {str(plugin.get("name")).partition("@")[0] for plugin in run.stack}
    own = [name for name in run.final if name in KEPT or "/" not in name or name.partition("/")[0] not in plugins]
    return sorted(own, key=metric_rank)


def bests(run: RunFolder) -> dict[str, tuple[int, float]]:
    """Return the best (update, value) in validation or test of every metric with a known direction; of a group, the
    mean of its runs' best values, and of their updates."""
    if isinstance(run, RunGroup):
        every = {each.path.name: bests(each) for each in run.finished}
        updates, values = (
            spreads({name: {metric: best[i] for metric, best in found.items()} for name, found in every.items()})
            for i in (0, 1)
        )
        return {name: (round(updates[name]), value) for name, value in values.items()}
    found = {}
    for name, points in run.series.items():
        mode = run.best.mode if run.best is not None and run.best.monitor == name else mode_of(name)
        if mode in ("min", "max") and name.startswith(("val/", "test/")):
            found[name] = best_of(points, mode)
    return {name: best for name, best in found.items() if best is not None}


def surroundings(run: RunFolder) -> dict[str, Any]:
    """Return machine, versions and command; of a resumed run, those of all attempts."""
    if isinstance(run, RunGroup):
        return merged([surroundings(each) for each in run.runs]) | {"command": run.card.get("command")}
    card, git = run.card, as_dict(run.card.get("git"))
    commit = f"{str(git.get('commit'))[:12]}{' with local changes' if git.get('dirty') else ''}" if git else None
    attempts = attempts_of(run)
    return {
        "command": commands(attempts) if len(attempts) > 1 else card.get("command"),
        **_flat(as_dict(card.get("versions")), ""),
        "device": card.get("device"),
        "machine": card.get("machine"),
        "ranks": card.get("world"),
        "commit": commit,
        "parameters": as_dict(card.get("task")).get("parameters"),
        **changed_setup(attempts),
    }


def difference(values: Sequence[Any]) -> float | None:
    """Return the second number minus the first; None unless both are finite."""
    match values:
        case [int() | float() as one, int() | float() as other] if math.isfinite(one) and math.isfinite(other):
            return other - one
    return None


def only_names(found: Rows) -> Rows:
    """Drop the options of plugins that some run lacks: one row per plugin is enough."""
    absent = {key.removeprefix("plugin ") for key in found if key.startswith("plugin ")}
    kept = {key: values for key, values in found.items() if key.partition(".")[0] not in absent}
    if absent:
        kept.pop("order of plugins", None)
    return kept


def _flat(values: Mapping[str, Any], parent: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{parent}.{key}" if parent else str(key)
        found |= _flat(value, name) if isinstance(value, dict) and value else {name: value}
    return found
