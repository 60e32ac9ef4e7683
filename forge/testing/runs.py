"""run_tiny: a tiny fit in its own run folder, with its metrics and hook calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config.build import make_plugins
from forge.contract.plugin import Plugin, on
from forge.contract.task import TaskModule
from forge.engine.trainer import FitResult
from forge.testing.events import EventTrace
from forge.testing.tiny import fit_tiny


@dataclass(frozen=True, slots=True)
class TinyRun:
    """A finished fit."""

    task: TaskModule
    "The trained task."
    result: FitResult
    metrics: dict[int, dict[str, Any]]
    "Logged metrics by update."
    trace: EventTrace
    "Every hook call, in order."
    run_dir: Path

    def series(self, metric: str) -> list[tuple[int, Any]]:
        """Return (update, value) of every logged value of a metric."""
        found = [(update, logged[metric]) for update, logged in self.metrics.items() if metric in logged]
        names = dict.fromkeys(name for logged in self.metrics.values() for name in logged)
        assert found, f"{metric!r} was never logged; logged were {', '.join(names)}."
        return found


def run_tiny(
    plugins: Iterable[Plugin | type[Plugin] | str] = (),
    *,
    run_dir: Path,
    task: TaskModule | None = None,
    train: Any = None,
    val: Any = None,
    **trainer_options: Any,
) -> TinyRun:
    """Fit a TinyTask with these plugins in `run_dir`, and log every update.

    The defaults are two epochs of five updates with seed 0 on the CPU; the Trainer's options change them. An EventTrace
    among the plugins is used, else one is added.
    """
    stack = make_plugins(list(plugins))
    given = next((plugin for plugin in stack if isinstance(plugin, EventTrace)), None)
    trace = given or EventTrace()
    logged: dict[int, dict[str, Any]] = {}

    @on("log")
    def note(update: int, metrics: dict[str, Any]) -> None:
        logged.setdefault(update, {}).update(metrics)

    options: dict[str, Any] = {"run_dir": run_dir, "log_every": 1, **trainer_options}
    stack = [*(plugin for plugin in stack if plugin is not trace), note, trace]
    trained, result = fit_tiny(stack, task=task, train=train, val=val, **options)
    return TinyRun(trained, result, logged, trace, run_dir)
