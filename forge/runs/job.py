"""The job of a run: the options that decide its result. A run is continued only by the same job.

A job is read from the run card, so runs of every version have one. Only options that both jobs know are compared: an
option that a task has gained or lost since says nothing about the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.contract.plugin import Plugin, plugin_options
from forge.options import plain
from forge.runs.folder import as_dict

if TYPE_CHECKING:
    from forge.contract.run import AnyRecipe, Run
    from forge.contract.task import TaskModule

FREE = frozenset(
    {"device", "workers", "num_workers", "prefetch", "prefetch_factor", "pin_memory", "persistent_workers"}
)
"""Options of a task or its data that say where and how fast, not what."""
RANKS = frozenset({"strategy", "sharding", "split_layers"})
"""What plugins provide that only say how many ranks there are, and what each of them has."""
LIMITS = ("max_epochs", "max_updates")

Job = Mapping[str, Any]
"""The part of a run card that describes its job: task, data, stack, trainer and seed."""


def name_of(task: TaskModule) -> str:
    """Return the task's class name, or its `task_name` if it wraps another module."""
    given = getattr(task, "task_name", None)
    return given if isinstance(given, str) and given else type(task).__name__


def job_of(trainer: Run) -> dict[str, Any]:
    """Return the job of a Trainer, as in its card. The launcher of several ranks has no task yet, only its options."""
    task: TaskModule | None = getattr(trainer, "task", None)
    given = as_dict(_resolved(trainer.recipe).get("task")) if task is None else task.init_args
    return {
        "task": {
            "class": None if task is None else name_of(task),
            "options": {key: plain(value) for key, value in given.items() if task is not None or key != "name"},
        },
        "data": as_dict(_resolved(trainer.recipe).get("data")),
        "stack": [describe(plugin) for plugin in trainer.stack],
        "trainer": {**trainer.settings, **{limit: getattr(trainer, limit) for limit in LIMITS}},
        "seed": trainer.seed,
    }


def describe(plugin: Plugin) -> dict[str, Any]:
    """Return a plugin as the card has it."""
    return {
        "name": plugin.name,
        "class": type(plugin).__name__,
        "options": plugin_options(plugin),
        "observer": plugin.observer,
        "provides": list(plugin.provides),
    }


def another_job(then: Job, now: Job) -> str:
    """Return the first option of task, data and seed that differs, with both values; empty for the same job."""
    return next(_worded(_identity(then), _identity(now)), "")


def changed_plan(then: Job, now: Job) -> str:
    """Return the first difference that only the user can mean: a plugin, one of its options, or a lower limit."""
    return next(_plan_differences(then, now), "")


def _plan_differences(then: Job, now: Job) -> Iterator[str]:
    before, after = _plugins(then), _plugins(now)
    for name, plugin in {**before, **after}.items():
        if _is_free(plugin):
            continue
        if name in before and name in after:
            yield from _worded({name: before[name].get("options")}, {name: plugin.get("options")})
        elif name in after:
            yield f"plugin {name} was not in the stack and is"
        elif "observer" in plugin and as_dict(now.get("task")).get("class"):  # a launcher has not configured its stack
            yield f"plugin {name} was in the stack and is not"
    limits = [(limit, *(as_dict(job.get("trainer")).get(limit) for job in (then, now))) for limit in LIMITS]
    for limit, earlier, later in limits:
        if later is not None and (earlier is None or later < earlier):
            yield f"trainer.{limit} was {earlier!r} and is {later!r}"


def _plugins(job: Job) -> dict[str, dict[str, Any]]:
    stack = job.get("stack")
    return {str(p.get("name")): p for p in (stack if isinstance(stack, list) else []) if isinstance(p, dict)}


def _is_free(plugin: Mapping[str, Any]) -> bool:
    """Whether a plugin may come and go: it only observes, or divides the work among ranks."""
    provides = plugin.get("provides")
    return bool(plugin.get("observer")) or not RANKS.isdisjoint(provides if isinstance(provides, list) else ())


def _identity(job: Job) -> dict[str, Any]:
    task = as_dict(job.get("task"))
    sections = {"task": as_dict(task.get("options")), "data": as_dict(job.get("data"))}
    options = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    named = {"task": task["class"]} if task.get("class") else {}
    found = {**named, **options, "the seed": job.get("seed")}
    return {key: value for key, value in found.items() if key.rpartition(".")[2] not in FREE}


def _worded(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield "task.lr was 0.1 and is 0.2" for every key of both that differs."""
    for key in (key for key in then if key in now):
        for path, old, new in _differences(key, then[key], now[key]):
            yield f"{path} was {old!r} and is {new!r}"


def _differences(path: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _differences(f"{path}.{key}", then.get(key), now.get(key))
    elif _comparable(then) != _comparable(now) and not (_is_place(then) and _is_place(now)):
        yield path, then, now


def _comparable(value: Any) -> Any:
    """Return a value without the addresses of objects, which differ in every process; NaN equals itself."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, float) and value != value:
        return "nan"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", value) if isinstance(value, str) else value


def _is_place(value: Any) -> bool:
    """Whether a value is an absolute path: files may be moved between two attempts."""
    return isinstance(value, str) and Path(value).is_absolute()


def _resolved(recipe: AnyRecipe | None) -> dict[str, Any]:
    return {} if recipe is None else getattr(recipe, "resolved", recipe.config)
