"""`forge plan --measure`: train a few updates of the recipe and show the time that each plugin takes."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from forge.cli import target
from forge.config import Recipe
from forge.errors import ForgeError
from forge.util import show

WARNING = "warning: "
UPDATES = 30
RARE_HOOKS = ("forge_log", "forge_evaluate", "forge_save")
"""Hooks that are not called in every update, so a short measurement may miss them."""


def measure(recipe: Recipe, updates: int | None) -> dict[str, Any]:
    """Train some updates in a temporary folder; return what they took, as `HookTimes.report` has it."""
    from forge.contract.plugin import on
    from forge.spans.goodput import TimeAccount
    from forge.spans.record import HookTimes

    updates = UPDATES if updates is None else updates
    if updates < 2:
        raise ForgeError("--updates must be at least 2: the first update is a warm-up and is not counted.")
    account = TimeAccount()
    times = HookTimes(account)

    @on("boundary", mutates=True)
    def count(trainer: Any, step: Any) -> None:
        account.update(step)
        times.update(step.index)
        if trainer.progress.update >= updates:  # schedules see the run's full planned length
            trainer.request_stop("measured enough")

    times.leave_out = count
    folder = tempfile.mkdtemp(prefix="forge-plan-")
    try:
        with _muted():
            trainer, task, data = target.build(recipe, folder)
            trainer.stack.add(count)
            trainer.instrument = times.instrument
            trainer.fit(task, data.train, data.val)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return times.report()


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
    """Print a report; `implemented` are the hooks that the stack implements."""
    from forge.spans.told import as_text

    console = show.console()
    console.print()
    console.print(show.heading("Costs, measured"))
    console.print(Text(as_text(report)), soft_wrap=True)
    called = {row["hook"] for row in report["rows"]}
    missed = [hook.removeprefix("forge_") for hook in RARE_HOOKS if hook in implemented and hook not in called]
    if missed:
        line = f"not called in these updates: {', '.join(missed)}; --updates N measures longer"
        console.print(Text(line, "dim"), soft_wrap=True)
