"""Several runs side by side: recipe, result and surroundings as flat values by dotted name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from forge.runs.attempts import changed_setup, commands, lives_of
from forge.runs.directions import best_of, mode_of
from forge.runs.folder import Run, is_modest

Rows = dict[str, list[Any]]
KEPT = ("throughput/samples_per_s", "throughput/tokens_per_s", "throughput/peak_gb")
"""Of what plugins say of themselves, what is a result."""
MOST_SETTINGS = 10_000


def compare(runs: Sequence[Run]) -> dict[str, Rows]:
    """What differs between runs, in three parts; None where a run does not have it. Results are shown in full."""
    return {
        "recipe": only_names(differing(runs, settings)),
        "result": rows(runs, results),
        "surroundings": differing(runs, surroundings),
    }


def rows(runs: Sequence[Run], tell: Callable[[Run], dict[str, Any]]) -> Rows:
    told = [tell(run) for run in runs]
    keys = dict.fromkeys(key for values in told for key in values)
    return {key: [values.get(key) for values in told] for key in keys}


def differing(runs: Sequence[Run], tell: Callable[[Run], dict[str, Any]]) -> Rows:
    return {key: values for key, values in rows(runs, tell).items() if any(value != values[0] for value in values)}


def settings(run: Run) -> dict[str, Any]:
    """The recipe as it ran, defaults included: the card has every option of task, trainer and plugins."""
    card = run.card
    task = _mapping(card.get("task"))
    found = {"recipe": card.get("recipe"), "task": task.get("class"), **_flat(_mapping(task.get("options")), "task")}
    found |= _flat(_data(run), "data")
    found |= _flat(_mapping(card.get("trainer")), "trainer")
    found |= _flat(_mapping(card.get("optimizers")), "")
    for plugin in run.stack:
        name = str(plugin.get("name"))
        found |= {f"plugin {name}": "yes", **_flat(_mapping(plugin.get("options")), name)}
    return found | {"order of plugins": ", ".join(str(plugin.get("name")) for plugin in run.stack)}


def results(run: Run) -> dict[str, Any]:
    """What it came to: counters, time, and every metric's last and best value."""
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


def metrics_of(run: Run) -> list[str]:
    """Names of metrics that are results: training, validation, test, then others, without plugins' notes to self."""
    plugins = {str(plugin.get("name")).partition("@")[0] for plugin in run.stack}
    heads = ("val", "test", "train")

    def rank(name: str) -> tuple[int, str]:
        head = name.partition("/")[0]
        return (heads.index(head) if head in heads else len(heads), name)

    own = [name for name in run.final if name in KEPT or "/" not in name or name.partition("/")[0] not in plugins]
    return sorted(own, key=rank)


def bests(run: Run) -> dict[str, tuple[int, float]]:
    """(update, value) of the best validation or test of every metric whose name, or checkpoint, says what is better."""
    found = {}
    for name, points in run.series.items():
        watched = run.best is not None and run.best.monitor == name
        mode = run.best.mode if run.best is not None and watched else mode_of(name)
        if mode in ("min", "max") and name.startswith(("val/", "test/")):
            best = best_of(points, mode)
            if best is not None:
                found[name] = best
    return found


def surroundings(run: Run) -> dict[str, Any]:
    """Where it ran, and with what; of a run that was continued, what each of its lives had."""
    card, git = run.card, _mapping(run.card.get("git"))
    commit = f"{str(git.get('commit'))[:12]}{' with local changes' if git.get('dirty') else ''}" if git else None
    lives = lives_of(run)
    return {
        "command": commands(lives) if len(lives) > 1 else card.get("command"),
        **_flat(_mapping(card.get("versions")), ""),
        "device": card.get("device"),
        "machine": card.get("machine"),
        "ranks": card.get("world"),
        "commit": commit,
        "parameters": _mapping(card.get("task")).get("parameters"),
        **changed_setup(lives),
    }


def difference(values: Sequence[Any]) -> float | None:
    """The second number less the first, if there are two."""
    match values:
        case [int() | float() as one, int() | float() as other] if math.isfinite(one) and math.isfinite(other):
            return other - one
    return None


def only_names(found: Rows) -> Rows:
    """A plugin that one run does not have is one row, without a row for each of its options."""
    absent = {key.removeprefix("plugin ") for key in found if key.startswith("plugin ")}
    kept = {key: values for key, values in found.items() if key.partition(".")[0] not in absent}
    if absent:
        kept.pop("order of plugins", None)
    return kept


def _data(run: Run) -> dict[str, Any]:
    """The recipe's data section: the card does not have it."""
    try:
        config = yaml.safe_load(run.recipe_text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return _mapping(_mapping(config).get("data")) if is_modest(config, MOST_SETTINGS) else {}


def _flat(values: Mapping[str, Any], parent: str) -> dict[str, Any]:
    return dict(_leaves(values, parent))


def _leaves(values: Mapping[str, Any], parent: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{parent}.{key}" if parent else str(key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, name)
        else:
            yield name, value


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
