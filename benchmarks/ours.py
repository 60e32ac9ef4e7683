"""forge as a contender: with an empty stack, and with the recipe `default`."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import forge
from benchmarks.cases import Batch, Batches, Case, loss_of
from benchmarks.contenders import Contender
from forge_plugins import Accumulate, Clip, Guard, Spans


class Classifier(forge.TaskModule):
    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        self.network = case.build()

    def training_step(self, batch: Batch) -> Tensor:
        return loss_of(self.network, batch)

    def configure_optimizers(self) -> Optimizer | tuple[Optimizer, LRScheduler]:
        optimizer = self.case.optimizer(self.network)
        return (optimizer, self.case.schedule(optimizer)) if self.case.scheduled else optimizer


def least(case: Case, batches: Batches, folder: Path) -> nn.Module:
    trainer = forge.Trainer(max_updates=batches.updates, plugins=_stack(case), run_dir=False)
    task = Classifier(case)
    trainer.fit(task, batches)
    return task.network


def guarded(case: Case, batches: Batches, folder: Path) -> nn.Module:
    trainer = forge.Trainer(max_updates=batches.updates, plugins=[*_stack(case), Guard()], run_dir=False)
    task = Classifier(case)
    trainer.fit(task, batches)
    return task.network


def recorded(case: Case, batches: Batches, folder: Path) -> nn.Module:
    plugins = [*_stack(case), Spans(hooks=True, rates=True)]
    trainer = forge.Trainer(max_updates=batches.updates, plugins=plugins, run_dir=False)
    task = Classifier(case)
    trainer.fit(task, batches)
    return task.network


def default(case: Case, batches: Batches, folder: Path) -> nn.Module:
    trainer = forge.Trainer(
        max_updates=batches.updates, recipe="default", plugins=_stack(case), run_dir=folder, allow_inexact=True
    )
    task = Classifier(case)
    trainer.fit(task, batches)
    return task.network


def _stack(case: Case) -> list[forge.Plugin]:
    plugins: list[forge.Plugin] = []
    if case.accumulate > 1:
        plugins.append(Accumulate(case.accumulate))
    if case.clip is not None:
        plugins.append(Clip(case.clip))
    return plugins


OURS = [
    Contender("forge", least, "plugins=[], run_dir=False; batches unchanged"),
    Contender("forge guard", guarded, "plugins=[Guard()]: every loss and gradient is looked at"),
    Contender("forge spans", recorded, "plugins=[Spans(hooks=True, rates=True)]: every hook is timed"),
    Contender("forge default", default, "recipe default: progress, jsonl, tensorboard, guard, checkpoint"),
]
