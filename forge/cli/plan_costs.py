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


def measure(recipe: Recipe, updates: int | None) -> dict[str, Any]:
    """Train some updates in a temporary folder and return the report of the plugin that provides "hook_costs"."""
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
    report: dict[str, Any] = trainer.stack[meter].report  # pyright: ignore[reportAttributeAccessIssue]
    for key in ("rows", "once"):
        report[key] = [row for row in report[key] if row["plugin"] != STOP]
    return report


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


def show_costs(report: dict[str, Any], implemented: Sequence[str]) -> None:
    """Print the report; `implemented` are the hooks that the stack implements."""
    console = show.console()
    console.print()
    console.print(show.heading("Costs, measured"))
    if not report["updates"]:
        console.print(Text("The run ended before its second update: nothing was measured.", "dim"))
        return
    console.print(_summary(report), soft_wrap=True)
    grid = show.table("plugin", "hook", "calls", "µs/update", "share", "worst µs")
    for column in grid.columns[2:]:
        column.justify = "right"
    for row in report["rows"]:
        numbers = f"{row['us_per_update']:,.1f}", f"{row['share']:.1%}", f"{row['worst_us']:,.0f}"
        calls = f"{row['calls_per_update']:.3g}"
        grid.add_row(row["plugin"], _hook(row), calls, *numbers, style="" if row["is_cost"] else "dim")
    if report["rows"]:
        console.print(grid)
    for line in _notes(report, implemented):
        console.print(Text(line, "dim"), soft_wrap=True)
    for sync in report.get("syncs", []):
        if not sync["expected"]:
            where = f"{sync['who']}, {sync['file']}:{sync['line']}: {sync['code']}"
            console.print(Text(f"host sync, {sync['per_update']:.2g} per update: {where}", "yellow"), soft_wrap=True)


def _summary(report: dict[str, Any]) -> Text:
    total = f"{report['total_us']:,.1f} µs, {report['total_share']:.1%}"
    updates = f"{report['updates']} updates of {report['update_us']:,.0f} µs on average, logs and saves included"
    text = Text.assemble(f"{updates}; plugins take ", (total, "bold"), " of each")
    excluded = [
        f"{report[key]:,.0f} µs {what}"
        for key, what in (("data_wait_us", "waiting for data"), ("validation_us", "of validation"))
        if report[key] >= 0.5
    ]
    return text.append(f" (not counted: {', '.join(excluded)})" if excluded else "")


def _hook(row: dict[str, Any]) -> str:
    work = "" if row["is_cost"] else ", instead of core"
    return f"{row['hook'].removeprefix('forge_')}{' (validation)' if row['in_validation'] else ''}{work}"


def _notes(report: dict[str, Any], implemented: Sequence[str]) -> Iterator[str]:
    once = {"start": "before the first update", "end": "after the last"}
    for when, label in once.items():
        rows = [row for row in report["once"] if row["when"] == when and row["ms"] >= 0.05]
        if rows:
            listed = (f"{row['plugin']} {row['hook'].removeprefix('forge_')} {row['ms']:.1f} ms" for row in rows)
            yield f"{label}: {', '.join(listed)}"
    called = {row["hook"] for row in report["rows"]}
    missed = [hook.removeprefix("forge_") for hook in RARE_HOOKS if hook in implemented and hook not in called]
    if missed:
        yield f"not called in these updates: {', '.join(missed)}; --updates N measures longer"
