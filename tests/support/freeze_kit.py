"""What the tests of freeze share."""

from __future__ import annotations

from torch import Tensor, nn

import forge


def frozen(task: nn.Module) -> set[str]:
    return {name for name, parameter in task.named_parameters() if not parameter.requires_grad}


def evaluating(task: nn.Module) -> set[str]:
    return {name for name, module in task.named_modules() if not module.training}


class Look(forge.Plugin):
    """What is frozen, and in evaluation mode, at the beginning and after every update."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.frozen: list[set[str]] = []
        self.evaluating: list[set[str]] = []

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        self._look(trainer)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Trainer) -> None:
        self._look(trainer)

    def _look(self, trainer: forge.Trainer) -> None:
        self.frozen.append(frozen(trainer.task))
        self.evaluating.append(evaluating(trainer.task))


def statistics(task: nn.Module) -> list[Tensor]:
    return [task.net[1].running_mean, task.net[1].running_var, task.net[1].num_batches_tracked]  # pyright: ignore
