"""The exponential moving average of the weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import forge
from forge.errors import RecipeError
from forge_plugins.averaging.average import Averaging

logger = logging.getLogger("forge")


class EMA(Averaging):
    """Keep an exponential moving average of the weights, and evaluate and export it in their place.

    After every update the average moves towards the weights by a share of 1 - decay, so it covers about the last
    1 / (1 - decay) updates. For a half-life of n updates set decay = 0.5 ** (1 / n). Skipped updates do not count. The
    average starts as a copy of the weights after the first update beyond `start`. With `warmup` the n-th step uses a
    decay of at most (1 + n) / (10 + n), so that the first weights do not hold the average back.

    Training is bit for bit the same as without it. Validation inside a fit, and RUN/weights.safetensors at its end, use
    the average: it is copied into the memory of the weights, and the weights are restored afterwards, even after an
    error. This works with compiled and captured models. The task itself, and `model` in every checkpoint, hold the
    trained weights. To load the average: `Task.from_checkpoint(run)` of a finished run; `forge ckpt export CHECKPOINT
    OUT --weights ema` or `Task.from_checkpoint(checkpoint, weights="ema")` of any checkpoint; `plugin.apply_to(task)`
    after a fit in Python.

    All parameters of the task are averaged, whatever the number of optimizers; frozen ones take neither time nor memory
    until they are thawed. bf16 and fp16 weights are averaged in float32. The cost is one copy of the weights, one
    kernel per update, and two copies around each evaluation. A second average, `ema@slow`, can run beside the first
    with evaluate=false; it is saved and can be exported. The log states the first update at which the average is
    evaluated.

    `self.averaged(self.net)` in a step is `self.net` with its averaged weights, as a target network or a mean teacher
    ([several models](../several-models.md)). A task that asks for it in its first step begins the average there, with
    the first weights, unless `start` says when.

    ::

        forge fit quickstart --run-dir runs/averaged trainer.max_epochs=3 -p ema ema.decay=0.95
        forge ckpt export runs/averaged/checkpoints/latest average.safetensors --weights ema
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        decay: float = 0.999
        "Share of the average that stays at each update: at least 0, below 1."
        start: int | float | str = 0
        "When averaging begins: updates (500), a share of the run (0.1), '500 updates' or '2 epochs'."
        warmup: bool = False
        "Start with a smaller decay: (1 + n) / (10 + n) at the n-th step, while that is smaller."
        every: int = 1
        "Updates between two moves of the average."
        buffers: Literal["copy", "average"] = "copy"
        "BatchNorm's statistics and other buffers: copied from training, or averaged like weights."
        evaluate: bool = True
        "Evaluate and export the average; false: only keep it, beside another average."

    config: Config
    example = {"decay": 0.5}
    cures = {"average": "-p {name}"}
    begins_when_asked = True

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
        reach = round(self.config.every / (1 - self.config.decay))
        updates = (trainer.planned_updates or 0) - self._start
        # the average of a short run is evaluated anyway, and looks like bad training
        if trainer.verb == "fit" and 0 < updates < reach and not self.config.warmup:
            text = "%s: a decay of %g averages over about %d updates, but this run averages only %d: set %s.warmup=true"
            logger.warning(f"{text}, or a smaller decay.", self.name, self.config.decay, reach, updates, self.name)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        self._take(step)
        self._average.refresh()

    def _take(self, step: forge.Step) -> None:
        config, average = self.config, self._average
        if not step.updated or (step.index + 1) % config.every or (step.index < self._start and not average.count):
            return
        n = average.count
        decay = min(config.decay, (1 + n) / (10 + n)) if config.warmup else config.decay
        average.take(1 - decay)
