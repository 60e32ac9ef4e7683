"""Checks of the task's weights as a fit begins."""

from __future__ import annotations

from forge.contract.run import Run
from forge.diagnose.checks.user_line import warn
from forge.rng import DrawnWeights
from forge.snapshot.finite import note_start
from forge.util.text import few


def look_at_weights(trainer: Run, resumes: bool) -> None:
    """Note which weights are finite, and warn of those that were drawn before any seed was set."""
    note_start(trainer.task)
    drawn = DrawnWeights.by_task.pop(trainer.task, None)  # the weights are trained from now on
    if drawn is not None and not resumes and trainer.env.is_main:
        warn_of_unseeded_weights(trainer, drawn)


def warn_of_unseeded_weights(trainer: Run, drawn: DrawnWeights) -> None:
    """Warn if the run has a seed that came too late for the task's initial weights."""
    task, seed = trainer.task, trainer.seed
    names = [] if seed is None else drawn.weights(task)
    if names:
        warn(
            f"{type(task).__name__}'s weights ({few(names)}) were drawn before any seed was set, so seed={seed} does "
            "not make this run reproducible: every process begins with others. Make the Trainer before the task, or "
            f"call forge.seed({seed}) before the task is made.",
            "unseeded",
        )
