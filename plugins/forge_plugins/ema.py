"""The exponential moving average of the weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import forge
from forge.errors import RecipeError
from forge_plugins._average import Averaging

logger = logging.getLogger("forge")


class EMA(Averaging):
    """Keep an exponential moving average of the weights, and evaluate and export it in their place.

    After every update the average moves by a share of 1 - decay towards the weights, so about the last 1 / (1 - decay)
    updates count. For a half-life of n updates use decay = 0.5 ** (1 / n). A skipped update does not count. The average
    starts as a copy of the weights after the first update beyond `start`. With `warmup` the n-th step uses a decay of
    at most (1 + n) / (10 + n), so that the initial weights are forgotten sooner.

    When to use it: for better validation results at almost no cost: one copy of the weights, one kernel per update, and
    two copies around each evaluation.

    Training does not change, bit for bit. Validation inside a fit, and RUN/weights.safetensors at its end, use the
    average: it is copied into the memory of the weights, which are restored afterwards, even after an error. So it
    works with compiled and captured models. The task itself, and `model` in every checkpoint, keep the trained weights.

    What you see: the log says from which update on the average is evaluated. To load it: `Task.from_checkpoint(run)`
    for a finished run; `forge ckpt export CHECKPOINT OUT --weights ema` or `Task.from_checkpoint(checkpoint,
    weights="ema")` for any checkpoint; `plugin.apply_to(task)` after a fit in Python.

    All parameters of the task are averaged, for any number of optimizers; frozen ones take neither time nor memory
    until they are unfrozen. bf16 and fp16 weights are averaged in float32.

    Together with: a second average, `ema@slow`, works beside the first with evaluate=false; it is saved and can be
    exported.

    ::

        forge fit quickstart --run-dir runs/averaged trainer.max_epochs=3 -p ema ema.decay=0.95
        forge ckpt export runs/averaged/checkpoints/latest average.safetensors --weights ema
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        decay: float = 0.999
        "Share of the average that is kept at each update, from 0 to below 1."
        start: int | float | str = 0
        "When averaging begins: updates (500), a share of the run (0.1), '500 updates' or '2 epochs'."
        warmup: bool = False
        "Start with a smaller decay: (1 + n) / (10 + n) at the n-th step, while that is less."
        every: int = 1
        "Move the average every so many updates."
        buffers: Literal["copy", "average"] = "copy"
        "BatchNorm's statistics and other buffers: copied from training, or averaged like weights."
        evaluate: bool = True
        "Evaluate and export the average; false only keeps it, beside another one."

    config: Config

    def __init__(self, *first: float, **values: Any):
        super().__init__(*first, **values)
        if not 0 <= self.config.decay < 1:
            raise RecipeError(
                f"ema.decay is {self.config.decay:g}; it must be at least 0 and below 1, where nothing would move."
            )
        if self.config.every < 1:
            raise RecipeError(f"ema.every is {self.config.every}; it must be at least 1.")

    def averages_buffers(self) -> bool:
        return self.config.buffers == "average"

    def due(self, step: forge.Step) -> bool:
        return (step.index + 1) % self.config.every == 0

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        super().forge_start(trainer)
        if trainer.verb == "fit" and trainer.planned_updates is not None and not self.config.warmup:
            self._warn_of_short_run(trainer.planned_updates - self._start)

    def _warn_of_short_run(self, updates: int) -> None:
        """An average that the run is too short for is evaluated all the same, and looks like bad training."""
        reach = round(self.config.every / (1 - self.config.decay))
        if 0 < updates < reach:
            text = "%s: a decay of %g averages over about %d updates, but this run averages only %d: set %s.warmup=true"
            logger.warning(f"{text}, or a smaller decay.", self.name, self.config.decay, reach, updates, self.name)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        config, average = self.config, self._average
        if not step.updated or (step.index + 1) % config.every or (step.index < self._start and not average.count):
            return
        n = average.count
        decay = min(config.decay, (1 + n) / (10 + n)) if config.warmup else config.decay
        average.take(1 - decay)
