"""Stochastic weight averaging."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

import forge
from forge.data.windows import length_of
from forge.errors import ForgeError, RecipeError, StackError
from forge.optim import optimizers
from forge.rng import combine_seeds
from forge.snapshot.sandbox import kept_buffers
from forge_plugins._average import Averaging
from forge_plugins._batch_statistics import batch_norms, estimate, unreadable
from forge_plugins._run_lengths import check_length, updates_of

logger = logging.getLogger("forge")


class SWA(Averaging):
    """Average the weights of the run's last part, all alike, and evaluate and export that average in their place.

    From `start` on, the weights at the end of every interval are taken into the mean. With `lr`, the learning rate goes
    there along half a cosine of length `anneal` and stays, whatever schedule the run had until then: averaging wants a
    rate at which the weights still move. Until weights were taken, evaluation and export use the trained ones.

    BatchNorm's statistics belong to the weights they were made with, so before an average is evaluated or exported they
    are estimated anew: `training_step` runs once over the training data, without a backward. Random numbers, metrics,
    modes, buffers and the training loader's place are put back after. Where the loader cannot be read a second time
    just then (persistent workers in the middle of an epoch, a stream that keeps its place, a loader of your own whose
    order may be another each time) the mean of the statistics serves, and a warning says so; at the run's end it can
    be. Without BatchNorm there is nothing to do.

    Training is not touched but for `lr`, bit for bit. The average is copied into the memory of the weights for
    validation inside a fit and for RUN/weights.safetensors; they are put back after, even after an error. The task
    itself, and `model` in every checkpoint, hold the trained weights. To get at the average:
    `Task.from_checkpoint(run)` of a finished run; `forge ckpt export CHECKPOINT OUT --weights swa` of any checkpoint
    (with the statistics of the last evaluation, or their mean); `plugin.apply_to(task)` after a fit in Python. It costs
    one copy of the weights, and a pass over the training data before each evaluation of a new average.

    ::

        forge fit quickstart trainer.max_epochs=4 -p swa swa.start=0.5 swa.lr=1e-3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        start: int | float | str = 0.75
        "When averaging begins: a share of the run (0.75), updates (500), '500 updates' or '3 epochs'."
        every: str = "1 epoch"
        "How often weights are taken: '1 epoch', '100 updates', '10000 samples'."
        lr: float | None = None
        "The learning rate from the start on, for all parameters; null leaves the run's schedule alone."
        anneal: int | float | str = "1 epoch"
        "How long the learning rate takes to get there: updates, a share of the run or an interval; 0: at once."
        update_bn: bool | int = True
        "Estimate BatchNorm's statistics anew for the average: from the whole training data, or from so many batches."
        evaluate: bool = True
        "Evaluate and export the average; false only keeps it, beside another one."

    config: Config

    def __init__(self, *first: float | int | str, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        check_length(config.anneal, "swa.anneal")
        self._every = forge.Interval(config.every)
        if self._every.unit == "second":
            raise RecipeError(
                f"swa.every is {config.every!r}: it is counted in updates, epochs or samples, not in time."
            )
        if config.lr is not None and config.lr <= 0:
            raise RecipeError(f"swa.lr is {config.lr:g}; it must be above 0 (or null to leave the schedule alone).")
        if config.update_bn is not True and config.update_bn is not False and config.update_bn < 1:
            raise RecipeError(f"swa.update_bn is {config.update_bn}; it is true, false or a number of batches.")
        self._forget()

    def _forget(self) -> None:
        self._moved = False
        "Whether the weights have changed since they were last taken."
        self._estimated = False
        "Whether BatchNorm's statistics belong to the average as it is."
        self._warned = False

    def averages_buffers(self) -> bool:
        return True

    def due(self, step: forge.Step) -> bool:
        return self._every.due(step)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        super().forge_start(trainer)
        if trainer.verb != "fit":
            return
        self._forget()
        if self.config.lr is not None:
            self._add_schedules(trainer, self.config.lr)
        whole = self.config.update_bn is True and self.config.evaluate
        if whole and length_of(trainer.loaders["train"][None]) is None and batch_norms(trainer.task):
            raise ForgeError(
                f"{self.name}.update_bn=true reads the training data once, but their loader has no length, so nobody "
                f"knows when that ends. Say how many batches to use: {self.name}.update_bn=200."
            )

    def _add_schedules(self, trainer: forge.Run, lr: float) -> None:
        """Behind whatever schedules there are, so that the rate from the start on is this one's."""
        anneal = updates_of(self.config.anneal, trainer, f"{self.name}.anneal")
        for name, entry in trainer.optimizers.entries.items():
            if any(item.monitor is not None for item in entry.schedules):
                raise StackError(
                    f"{self.name}.lr sets the learning rate, and so does the ReduceLROnPlateau of the task, after each "
                    f"validation. Leave one out: {self.name}.lr=null, or another schedule."
                )
            schedule = ToRate(entry.optimizer, lr, anneal, self._start, trainer.progress)
            trainer.optimizers.add_schedule(name, optimizers.Schedule(schedule))

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        average = self._average
        self._moved = self._moved or step.updated
        if self._moved and self._every.due(step) and (step.index >= self._start or average.count):
            average.take(1 / (average.count + 1))
            self._moved = self._estimated = False

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {**self._average.state_dict(), "moved": self._moved, "estimated": self._estimated}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.load_state_dict(state)
        self._moved, self._estimated = state["moved"], state["estimated"]

    # -- BatchNorm ----------------------------------------------------------------------------------------------------

    @contextmanager
    def in_place(self, trainer: forge.Run, over: bool = False) -> Iterator[None]:
        modules = batch_norms(trainer.task)
        with self._average.in_place(), kept_buffers(nn.ModuleList(modules)):
            if self.config.update_bn and modules and not self._estimated:
                reason = unreadable(trainer, over) or self._estimate(trainer, modules)
                if reason is not None:
                    self._warn(reason)
            yield

    def _estimate(self, trainer: forge.Run, modules: list[_BatchNorm]) -> str | None:
        """Put the statistics of the averaged weights into the average, and into the task, which holds it now.

        Returns why that was not possible, if so.
        """
        began = time.perf_counter()
        limit = None if self.config.update_bn is True else self.config.update_bn
        seen, found = estimate(trainer, modules, limit, combine_seeds(torch.initial_seed(), self._average.count))
        if not seen:
            return "the training loader has nothing more to give."
        names = {id(buffer): name for name, buffer in trainer.task.named_buffers()}
        with torch.no_grad():
            for buffer, value in found:
                buffer.copy_(value)
                average = self._average.tensors.get(names[id(buffer)])
                if average is not None:
                    average.copy_(value)
        self._estimated = all(names[id(buffer)] in self._average.tensors for buffer, _ in found)
        took = time.perf_counter() - began
        level = logging.INFO if took > 1 else logging.DEBUG
        logger.log(level, "%s: BatchNorm's statistics estimated from %d batches in %.1f s", self.name, seen, took)
        return None

    def _warn(self, reason: str) -> None:
        if not self._warned:
            text = "%s: BatchNorm's statistics are the mean of those that were averaged, not estimated anew: %s"
            logger.warning(text, self.name, reason)
        self._warned = True


class ToRate:
    """A schedule that does nothing until the averaging begins, then takes every group's rate to one value and holds it.

    It is torch's SWALR with cosine annealing, counted in updates of the run.
    """

    def __init__(self, optimizer: Optimizer, lr: float, anneal: int, start: int, progress: Any):
        self.optimizer, self.lr, self.anneal, self.start, self.progress = optimizer, lr, anneal, start, progress
        self.before: list[float] = []
        "Each group's rate when the averaging began."
        for group in optimizer.param_groups:
            if "lr" in group:  # as torch's schedules do: a resume compares it with what the task asks for
                group.setdefault("initial_lr", float(group["lr"]))
        if start == 0:
            self.step()

    def step(self) -> None:
        """Set the rate of the next update."""
        done = self.progress.update - self.start
        if done < 0:
            return
        groups = [group for group in self.optimizer.param_groups if "lr" in group]
        self.before += [float(group["lr"]) for group in groups[len(self.before) :]]
        share = min(1.0, done / self.anneal) if self.anneal else 1.0
        there = (1 - math.cos(math.pi * share)) / 2
        for group, before in zip(groups, self.before, strict=True):
            rate = self.lr * there + before * (1 - there)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"before": list(self.before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before = list(state["before"])
