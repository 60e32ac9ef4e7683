"""Rates of a run's updates, from their clock, the items of their batches, and their FLOPs."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import forge
from forge.spans.rates import StepClock, TimedUpdate, as_sentence, rates
from forge.util.tensors import tensors_in
from forge_plugins.spans.flops import FlopCount

RECENT = 10_000
"""Updates that the last line covers."""


class UpdateRates:
    """The rates of one fit. Its first two updates are not in them: one warms up, in the other FLOPs are counted."""

    def __init__(self, trainer: forge.Run, peak: float | None):
        self.clock, self.flops = StepClock.on(trainer.env.device), FlopCount()
        self.told = ""
        "What was counted."
        self._device, self._given = trainer.env.device, peak
        self._peak: float | None = None
        self._first = -1
        "The first update."
        self._items: str | None = None
        self._counts_items = trainer.task_defines_num_items
        self._recent: deque[TimedUpdate] = deque(maxlen=RECENT)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def counting(self, step: forge.Step) -> AbstractContextManager[Any] | None:
        """Return what to count this turn of an update in; None once all is counted."""
        if self._first < 0:
            self._first, self._items = step.index, self._name_items(step)
        if step.index - self._first > 1:
            self._peak, self.told = self.flops.peak(self._device, self._given)
            return None
        return self.flops.of(step) if step.index > self._first else nullcontext()

    def end(self, step: forge.Step) -> None:
        """End the clock of an update."""
        if 0 <= self._first < step.index - 1:
            self.clock.end(TimedUpdate(step.samples, self._items_of(step), step.data_wait))

    def take(self) -> dict[str, float]:
        """Return the rates of the updates that have ended since the last call, and the peak of memory."""
        done = self.clock.take()
        self._recent += done
        found = rates(done, self._items, self.flops.per_sample, self._peak)
        if found and self._device.type == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_allocated(self._device) / 1e9
        return {f"rates/{name}": value for name, value in found.items()}

    def least_seconds(self, trainer: forge.Run) -> float | None:
        """Return the seconds that an update takes a device at its peak; None where that is unknown."""
        peak, _ = self.flops.peak(self._device, self._given)
        each, updates = self.flops.per_sample, max(trainer.progress.update, 1)
        return None if peak is None or each is None else each * trainer.progress.sample / updates / peak

    def sentence(self) -> str:
        """Return a line about the whole run; empty without rates."""
        self._recent += self.clock.take()
        found = rates(self._recent, self._items, self.flops.per_sample, self._peak)
        return as_sentence(found) if found else ""

    def _name_items(self, step: forge.Step) -> str | None:
        first = next(tensors_in(step.window[0]), None)
        whole = first is not None and first.ndim == 2 and not (first.is_floating_point() or first.is_complex())
        return "tokens" if whole else "items" if self._counts_items else None

    def _items_of(self, step: forge.Step) -> Tensor | float:
        if self._items is None:
            return 0.0
        if self._counts_items:
            return sum(step.items[1:], start=step.items[0])
        return sum(tokens.numel() for batch in step.window for tokens in islice(tensors_in(batch), 1))
