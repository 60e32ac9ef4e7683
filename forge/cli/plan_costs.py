"""`forge plan --measure`: train a few updates of the recipe and show the time that each plugin takes."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge import registry
from forge.cli import target
from forge.config import Recipe
from forge.errors import ForgeError
from forge.util import show

if TYPE_CHECKING:
    from forge.contract.plugin import Callback

STOP, WARNING = "forge.plan.stop", "warning: "
UPDATES = 30
RARE_HOOKS = ("forge_log", "forge_evaluate", "forge_save")
"""Hooks that are not called in every update, so a short measurement may miss them."""


def measure(recipe: Recipe, updates: int | None) -> tuple[dict[str, Any], str]:
    """Train some updates in a temporary folder; return the report of the plugin that provides "hook_costs", as plain
    data and as text."""
    updates = UPDATES if updates is None else updates
    if updates < 2:
        raise ForgeError("--updates must be at least 2: the first update is a warm-up and is not counted.")
    meters = registry.providers("hook_costs")
    if not meters:
        raise ForgeError("--measure needs a plugin that provides hook_costs, and none is installed.")
    meter = next((name for name in recipe.plugins if name in meters), meters[0])
    if meter not in recipe.plugins:
        recipe = replace(recipe, config={**recipe.config, "plugins": {**recipe.plugins, meter: {}}})
    folder = tempfile.mkdtemp(prefix="forge-plan-")
    try:
        with _muted():
            trainer, task, data = target.build(recipe, folder)
            trainer.stack.add(_stop_after(updates))
            trainer.fit(task, data.train, data.val)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    used: Any = trainer.stack[meter]
    for key in ("rows", "once"):
        used.report[key] = [row for row in used.report[key] if row["plugin"] != STOP]
    return used.report, used.told()


def _stop_after(updates: int) -> Callback:
    """Return a callback that ends the run; schedules still see its full planned length."""
    from forge.contract.plugin import on

    @on("step_end", mutates=True)
    def stop(step: Any) -> None:
        if step.trainer.progress.update >= updates:
            step.trainer.request_stop("measured enough")

    stop.name = STOP
    return stop


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Hide progress and keep stdout for the plan; print warnings at the end."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(captured):
            yield
    finally:
        for line in captured.getvalue().splitlines():
            if line.startswith(WARNING):
                show.warning(line.removeprefix(WARNING))


def show_costs(report: dict[str, Any], told: str, implemented: Sequence[str]) -> None:
    """Print what the plugin tells of its report; `implemented` are the hooks that the stack implements."""
    console = show.console()
    console.print()
    console.print(show.heading("Costs, measured"))
    console.print(Text(told), soft_wrap=True)
    called = {row["hook"] for row in report["rows"]}
    missed = [hook.removeprefix("forge_") for hook in RARE_HOOKS if hook in implemented and hook not in called]
    if missed:
        line = f"not called in these updates: {', '.join(missed)}; --updates N measures longer"
        console.print(Text(line, "dim"), soft_wrap=True)
