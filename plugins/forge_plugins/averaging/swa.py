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
from torch.optim import Optimizer

import forge
from forge.contract.run_lengths import check_length, updates_of
from forge.data.accumulation_windows import length_of
from forge.errors import ForgeError, RecipeError, StackError
from forge.optim import schedule_stepping
from forge.rng import combine_seeds
from forge.snapshot.finite import not_finite
from forge.snapshot.sandbox import kept_buffers
from forge_plugins.averaging.average import Averaging
from forge_plugins.averaging.batch_statistics import batch_norms, estimate, unreadable

logger = logging.getLogger("forge")


class SWA(Averaging):
    """Average the weights of the last part of the run, and evaluate and export the average in their place.

    From `start` on, the weights at the end of every interval enter the mean, all with equal weight. With `lr`, the
    learning rate moves to that value along half a cosine of length `anneal` and stays there, in place of the run's
    schedule: averaging needs a rate at which the weights still move. Until weights have entered the mean, evaluation
    and export use the trained ones.

    When to use it: for better generalisation at the end of a long run. It costs one copy of the weights, and with
    BatchNorm a pass over the training data before each evaluation of a new average.

    BatchNorm's statistics belong to the weights that they were computed with. So before an average is evaluated or
    exported, they are estimated again: `training_step` runs once over the training data, without a backward pass.
    Random numbers, metrics, modes, buffers and the position of the training loader are restored afterwards. If the
    loader cannot be read a second time at that point (persistent workers in the middle of an epoch, a stream that keeps
    its position, a loader of your own with an order that may vary), the mean of the statistics is used, with a warning;
    at the end of the run it can be read. Without BatchNorm this is not needed.

    Training does not change, except by `lr`, bit for bit. The average is copied into the memory of the weights for
    validation inside a fit and for RUN/weights.safetensors; the weights are restored afterwards, even after an error.
    The task itself, and `model` in every checkpoint, keep the trained weights.

    What you see: validation metrics of the average. To load it: `Task.from_checkpoint(run)` for a finished run; `forge
    ckpt export CHECKPOINT OUT --weights swa` for any checkpoint (with the statistics of the last evaluation, or their
    mean); `plugin.apply_to(task)` after a fit in Python.

    ::

        forge fit quickstart trainer.max_epochs=4 -p swa swa.start=0.5 swa.lr=1e-3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        start: int | float | str = 0.75
        "When averaging begins: a share of the run (0.75), updates (500), '500 updates' or '3 epochs'."
        every: str = "1 epoch"
        "How often weights are added to the average: '1 epoch', '100 updates', '10000 samples'."
        lr: float | None = None
        "The learning rate from `start` on, for all parameters; null: keep the run's schedule."
        anneal: int | float | str = "1 epoch"
        "How long the learning rate takes to reach `lr`: updates, a share of the run or an interval; 0: at once."
        update_bn: bool | int = True
        "Estimate BatchNorm's statistics again for the average: from the whole training data, or from so many batches."
        evaluate: bool = True
        "Evaluate and export the average; false: only keep it, beside another average."

    config: Config

    def __init__(self, *first: float | int | str, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        check_length(config.anneal, "swa.anneal")
        self._every = forge.Interval(config.every)
        if self._every.unit == "second":
            raise RecipeError(f"swa.every is {config.every!r}; write it in updates, epochs or samples, not in time.")
        if config.lr is not None and config.lr <= 0:
            raise RecipeError(f"swa.lr is {config.lr:g}; it must be above 0, or null to keep the schedule.")
        if config.update_bn is not True and config.update_bn is not False and config.update_bn < 1:
            raise RecipeError(f"swa.update_bn is {config.update_bn}; it must be true, false or a number of batches.")
        self._forget()

    def _forget(self) -> None:
        self._moved = False
        "Whether the weights have changed since they were last averaged."
        self._estimated = False
        "Whether BatchNorm's statistics belong to the current average."
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
                f"{self.name}.update_bn=true reads all training data once, but the loader has no length. Give the "
                f"number of batches to use, for example {self.name}.update_bn=200."
            )

    def _add_schedules(self, trainer: forge.Run, lr: float) -> None:
        """Add a schedule after all others, so that it sets the rate from `start` on."""
        anneal = updates_of(self.config.anneal, trainer, f"{self.name}.anneal")
        for name, entry in trainer.optimizers.entries.items():
            if any(item.monitor is not None for item in entry.schedules):
                raise StackError(
                    f"{self.name}.lr sets the learning rate, and so does the ReduceLROnPlateau of the task, after each "
                    f"validation. Remove one: {self.name}.lr=null, or another schedule."
                )
            schedule = ToRate(entry.optimizer, lr, anneal, self._start, trainer.progress)
            trainer.optimizers.add_schedule(name, schedule_stepping.ScheduledLR(schedule))

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        average = self._average
        self._moved = self._moved or step.updated
        if self._moved and self._every.due(step) and (step.index >= self._start or average.count):
            average.take(1 / (average.count + 1))
            self._moved = self._estimated = False
        average.refresh()

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
                if reason is not None and not self._warned:
                    text = "%s: BatchNorm's statistics are the mean of the averaged ones, not estimated again: %s"
                    logger.warning(text, self.name, reason)
                    self._warned = True
            yield

    def _estimate(self, trainer: forge.Run, modules: list[Any]) -> str | None:
        """Store the statistics of the averaged weights in the average, and in the task, which holds it now.

        Return the reason if that was not possible.
        """
        began = time.perf_counter()
        limit = None if self.config.update_bn is True else self.config.update_bn
        seen, found = estimate(trainer, modules, limit, combine_seeds(torch.initial_seed(), self._average.count))
        if not seen:
            return "the training loader has no more batches."
        if not_finite(("", value) for _, value in found):
            return "a batch of the training data gives statistics that are not finite."
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


class ToRate:
    """A schedule that does nothing until averaging begins, then moves every group's rate to one value and holds it.

    It is torch's SWALR with cosine annealing, counted in updates of the run.
    """

    def __init__(self, optimizer: Optimizer, lr: float, anneal: int, start: int, progress: Any):
        self.optimizer, self.lr, self.anneal, self.start, self.progress = optimizer, lr, anneal, start, progress
        self.before: list[float] = []
        "Each group's rate when averaging began."
        for group in optimizer.param_groups:
            if "lr" in group:  # as torch's schedules do: a resume compares it with the task's
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
