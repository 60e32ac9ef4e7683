"""How much of an update a graph holds."""

from __future__ import annotations

from enum import IntEnum

import forge
from forge.optim.optimizers import drop_gradients


class Extent(IntEnum):
    """What a graph holds; the rest of the update runs after each replay, as it would without a graph."""

    WINDOW = 1
    "Forward and backward of every micro-batch."
    GRADIENTS = 2
    "Also the hooks that finalize, inspect and edit gradients."
    UPDATE = 3
    "Also the optimizer's step."

    @property
    def rest(self) -> str:
        """What stays outside, in words."""
        hooks = "gradient hooks and the optimizer's step run"
        return "the optimizer's step runs" if self is Extent.GRADIENTS else hooks

    def run(self, step: forge.Step) -> None:
        """Run what a graph holds."""
        if self is Extent.UPDATE:
            step.trainer.core.forge_train_step(step)
            return
        step.run_window()
        if self is Extent.GRADIENTS:
            step.gradient_phases(step.trainer.hooks)

    def finish(self, step: forge.Step) -> None:
        """Run the rest, on the gradients that the graph has computed."""
        step.micro = len(step.window) - 1
        if self is Extent.UPDATE:
            step.updated = True
            return
        if self is Extent.WINDOW:
            step.gradient_phases(step.trainer.hooks)
        step_optimizer(step)


def step_optimizer(step: forge.Step) -> None:
    """Run what follows on the gradient hooks."""
    step.updated = step.skip_reason is None and bool(step.trainer.hooks.forge_optimizer_step(step))
    drop_gradients(step.optimizer)
    step.finished = True
