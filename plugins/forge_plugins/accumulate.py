"""Gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass

import forge
from forge.errors import RecipeError


class Accumulate(forge.Plugin):
    """Accumulate gradients: average them over several micro-batches before each optimizer step.

    The mean is exact for micro-batches of different sizes and for the last, shorter window of an epoch; `num_items` on
    the task sets the weight of each micro-batch. Clipping, schedules and logs count updates, not micro-batches.
    BatchNorm computes its statistics per micro-batch.

    When to use it: for a larger batch than fits into memory.

    Together with: `ddp` and `fsdp` exchange gradients once per update, not per micro-batch.

    ::

        forge fit quickstart -p accumulate accumulate.window=4 data.batch_size=16
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        window: int = 4
        "Micro-batches per update."

    config: Config
    provides = ("accumulation",)

    def __init__(self, *first: int, **values: int):
        super().__init__(*first, **values)
        if self.config.window < 1:
            raise RecipeError(f"accumulate.window is {self.config.window}; it must be at least 1.")

    @forge.hookimpl
    def forge_plan_step(self) -> int:
        return self.config.window
