"""A validation before training."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import forge
from forge.errors import StackError


class ValidateFirst(forge.Plugin):
    """Validate before the first update: the metrics of the weights that training starts from, at update 0 of every log.

    `Trainer(validate_first=True)` turns it on, as does `trainer.validate_first=true` in a recipe or on the command
    line; there is no need to add it to a stack. It runs whatever `validate_every` says, and takes no random numbers
    from the run: the trained weights are the same with and without it. A resumed run does not validate again.

    When to use it: to fine-tune, where the start is a result to beat, and to find a mistake in a validation before an
    epoch of training. forge looks at the first batch of each stage in any case.

    Together with: `early_stop` and `checkpoint.best` do not compare it.

    ::

        forge fit quickstart trainer.validate_first=true
    """

    provides = ("validate_first",)
    observer = True
    effects = ("evaluates",)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._due = trainer.verb == "fit"
        if self._due and "val" not in trainer.loaders:
            raise StackError("validate_first is set, but this fit has no val loader. Pass one, or leave it out.")

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if self._due:
            self._due = False
            trainer = step.trainer
            if step.index == 0:
                trainer.log_metrics(0, trainer.hooks.forge_evaluate(trainer, "val"))
        return (yield)

    def due(self, step: forge.Step) -> bool:
        return step.index == 0
