"""Witness: record what each update of a fit computes, in the order of its computation, for `forge determinism`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.contract.step import Step
from forge.diagnose.checks.first_batch import is_compiled
from forge.snapshot.evidence import NUMBERS, mark_batches, mark_numbers, mark_state, mark_unsaved
from forge.twin.record import Record

LOSS = "the loss"
NUMBERS_BEFORE = f"{NUMBERS} before the forward pass"


class Witness(Plugin):
    """Mark what goes into each update and what it computes, causes before effects; stop the run after `updates`.

    Outputs of modules are left out where a part of the model is compiled: hooks on it would change what is compiled.
    """

    observer = True

    def __init__(self, record: Record, updates: int):
        super().__init__()
        self.name = "forge.determinism.witness"
        self.record, self.updates = record, updates
        self._seen = -1

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        self.record.watch(trainer.task, outputs=not is_compiled(trainer.model))

    @hookimpl(wrapper=True)
    def forge_train_step(self, step: Step) -> Generator[None, Any, Any]:
        if self._seen != step.index:  # with several optimizers this hook is called once for each
            self._seen = step.index
            mark_batches(self.record, step)
        mark_numbers(self.record, step.trainer, NUMBERS_BEFORE)
        return (yield)

    @hookimpl(wrapper=True)
    def forge_backward(self, step: Step, loss: Tensor) -> Generator[None, Any, Any]:
        turn = f"{step.name}, " if step.name else ""
        self.record.mark(f"{turn}micro-batch {step.micro}", loss, kind=LOSS)
        return (yield)

    @hookimpl
    def forge_inspect_grads(self, step: Step) -> None:
        self.record.mark_gradients(step.trainer.task)

    @hookimpl
    def forge_boundary(self, trainer: Run) -> None:
        mark_state(self.record, trainer)
        mark_numbers(self.record, trainer)
        mark_unsaved(self.record, trainer)
        self.record.update = trainer.progress.update + 1
        if trainer.progress.update >= self.updates:
            trainer.request_stop(f"{self.updates} updates were recorded", by=self.name)

    @hookimpl
    def forge_end(self) -> None:
        self.record.close()
