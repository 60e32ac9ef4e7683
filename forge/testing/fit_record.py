"""A record of a fit, with the marks that a loop of one's own makes by `Record.watch`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import nn

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.contract.step import Step
from forge.twin.record import Record


class RecordFit(Plugin):
    """Marks what the task computes and what its optimizers make of it: outputs, gradients, weights, state.

    `module` is the part of the task to record; by default all of it. `outputs=False` leaves outputs of modules out.
    """

    observer = True

    def __init__(self, record: Record, module: nn.Module | None = None, *, outputs: bool = True):
        super().__init__()
        self.name = "forge.testing.record"
        self.record, self.module, self.outputs = record, module, outputs

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        self.record.watch(self._part(trainer), outputs=self.outputs)
        self.record.update = trainer.progress.update + 1

    @hookimpl(wrapper=True)
    def forge_optimizer_step(self, step: Step) -> Generator[None, Any, Any]:
        self.record.mark_gradients(self._part(step.trainer))
        return (yield)

    @hookimpl
    def forge_boundary(self, trainer: Run) -> None:
        self.record.mark_update(self._part(trainer), trainer.optimizers.values())

    @hookimpl
    def forge_end(self) -> None:
        self.record.unwatch()

    def _part(self, trainer: Run) -> nn.Module:
        return trainer.task if self.module is None else self.module
