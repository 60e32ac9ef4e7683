"""Warn of weights that were drawn before any seed was set, in a run that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.diagnose.checks.user_line import warn
from forge.rng import initial_weights

if TYPE_CHECKING:
    from forge.contract.run import Run

SHOWN = 3
"""Parameters that the warning names."""


def warn_of_unseeded_weights(trainer: Run, resumes: bool) -> None:
    """Warn once if the seed came too late for the task's initial weights; a resumed run has its own."""
    task, seed = trainer.task, trainer.seed
    if seed is not None and not resumes and trainer.env.is_main:
        names = list(initial_weights.unseeded(task))
        if names:
            named = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            warn(
                f"{type(task).__name__}'s weights ({named}) were drawn before any seed was set, "
                f"so seed={seed} does not make this run reproducible: every process begins with others. Make the "
                f"Trainer before the task, or call forge.seed({seed}) before the task is made."
            )
    initial_weights.forget(task)
