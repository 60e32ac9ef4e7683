"""Rates of a run's updates: their times by the account of the run, the items of their batches, and their FLOPs."""

from __future__ import annotations

from collections import deque
from itertools import islice

import torch
from torch import Tensor

import forge
from forge.spans.device import Marks
from forge.spans.goodput import TimeAccount
from forge.spans.rates import TimedUpdate, as_sentence, rates
from forge.util.tensors import tensors_in
from forge_plugins.spans.flops import FlopCount

AT_ONCE = 256
"""Updates that a long log interval may hold before finished ones are collected."""
RECENT = 10_000
"""Updates that the last line covers."""


class UpdateRates:
    """The rates of one fit. Its first two updates are not in them: one warms up, in the other FLOPs are counted."""

    def __init__(self, trainer: forge.Run, account: TimeAccount, flops: FlopCount):
        self.flops, self._account = flops, account
        self._device = trainer.env.device
        self._times = account.device if self._device.type == "cuda" else None
        self._pending: deque[tuple[int, Tensor | float, float, list[Marks]]] = deque()
        "Updates that the device may not have finished."
        self._done: list[TimedUpdate] = []
        self._items: str | None = None
        self._counts_items = trainer.task_defines_num_items
        self._recent: deque[TimedUpdate] = deque(maxlen=RECENT)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, step: forge.Step) -> None:
        """Count an update that has ended."""
        parts = None if self._times is None else self._times.lap()
        if step.index - self.flops.first < 2:
            self._items = self._name_items(step)
            return
        items = 0.0 if self._items is None else self._items_of(step)
        if parts is None:
            self._done.append((step.samples, float(items), step.data_wait, self._account.took))
            return
        if isinstance(items, Tensor):  # a copy to pinned memory, which is there when the event has passed
            items = items.detach().to("cpu", non_blocking=True)
        self._pending.append((step.samples, items, step.data_wait, parts))
        if len(self._pending) >= AT_ONCE:
            self._collect()

    def take(self) -> dict[str, float]:
        """Return the rates of the updates known to be finished since the last call, and the peak of memory."""
        self._collect()
        found = rates(self._done, self._items, self.flops.per_sample, self.flops.peak)
        self._recent += self._done
        self._done = []
        if found and self._device.type == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_allocated(self._device) / 1e9
        return {f"rates/{name}": value for name, value in found.items()}

    def sentence(self) -> str:
        """Return a line about the whole run; empty without rates."""
        self._collect()
        found = rates([*self._recent, *self._done], self._items, self.flops.per_sample, self.flops.peak)
        return as_sentence(found) if found else ""

    def _collect(self) -> None:
        while self._times is not None and self._pending and self._times.passed(self._pending[0][-1][-1]):
            samples, items, waited, parts = self._pending.popleft()
            self._done.append((samples, float(items), waited, self._times.seconds(parts)))

    def _name_items(self, step: forge.Step) -> str | None:
        first = next(tensors_in(step.window[0]), None)
        whole = first is not None and first.ndim == 2 and not (first.is_floating_point() or first.is_complex())
        return "tokens" if whole else "items" if self._counts_items else None

    def _items_of(self, step: forge.Step) -> Tensor | float:
        if self._counts_items:
            return sum(step.items[1:], start=step.items[0])
        return sum(tokens.numel() for batch in step.window for tokens in islice(tensors_in(batch), 1))
