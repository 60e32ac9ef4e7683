"""Gradient accumulation."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import forge
from forge.errors import RecipeError


class Accumulate(forge.Plugin):
    """Accumulate gradients: average them over several micro-batches before each optimizer step.

    The mean is exact for micro-batches of different sizes and for the last, shorter window of an epoch; `num_items` on
    the task sets the weight of each micro-batch. Clipping, schedules and logs count updates, not micro-batches.
    BatchNorm computes its statistics per micro-batch.

    A mapping changes the window by epoch, counted from 0: with `{0: 8, 4: 2}` the first four epochs take 8
    micro-batches per update, later ones 2. The planned number of updates counts that. A length in epochs, as in
    `schedule.warmup="2 epochs"`, is taken in updates of the first epoch.

    When to use it: for a larger batch than fits into memory.

    Together with: `ddp` and `fsdp` exchange gradients once per update, not per micro-batch.

    ::

        forge fit quickstart -p accumulate accumulate.window=4 data.batch_size=16
        forge fit quickstart -p accumulate "accumulate.window={0: 4, 2: 1}" data.batch_size=16
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        window: int | dict[int, int] = 4
        "Micro-batches per update, or by the epoch from which on they hold: {0: 8, 4: 2}."

    config: Config
    provides = ("accumulation",)
    cures = {
        "batch": "half the batch with -p {name} {name}.window={window}, which keeps the update the same",
    }
    example = {"window": 2}

    def __init__(self, *first: int | dict[int, int], **values: int | dict[int, int]):
        super().__init__(*first, **values)
        window = self.config.window
        self._by_epoch = sorted((window if isinstance(window, dict) else {0: window}).items())
        if any(size < 1 for _, size in self._by_epoch):
            raise RecipeError(f"accumulate.window is {window}; it must be at least 1.")
        if not self._by_epoch or self._by_epoch[0][0] != 0:
            raise RecipeError(f"accumulate.window is {window}: say how it begins, at epoch 0, as in {{0: 8, 4: 2}}.")
        if len(self._by_epoch) == 1:
            self.forge_build_optimizers = None  # pyright: ignore[reportAttributeAccessIssue]

    @forge.hookimpl
    def forge_plan_step(self, trainer: forge.Run) -> int:
        return self._window(trainer.progress.epoch) if len(self._by_epoch) > 1 else self._by_epoch[0][1]

    def _window(self, epoch: int) -> int:
        return next(size for begin, size in reversed(self._by_epoch) if begin <= epoch)

    @forge.hookimpl(wrapper=True)
    def forge_build_optimizers(self, trainer: forge.Run) -> Generator[None, Any, Any]:
        batches, epochs = trainer.feed.length, trainer.max_epochs
        if batches is not None and epochs is not None:
            begins = [begin for begin, _ in self._by_epoch if begin < epochs]
            spans = zip(begins, [*begins[1:], epochs], strict=True)
            planned = sum((end - begin) * -(-batches // self._window(begin)) for begin, end in spans)
            trainer.planned_updates = min(planned, trainer.max_updates or planned)
        return (yield)
