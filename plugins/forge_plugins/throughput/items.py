"""What a batch holds beside samples: tokens, or whatever the task counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

import forge

logger = logging.getLogger("forge")


class Items:
    """Counts the items of a step. What they are called is known once the first window is there."""

    def __init__(self, given: str | None, task_counts: bool):
        self.name: str | None = None
        self._given, self._task_counts = given, task_counts
        self._decided = False

    def of(self, step: forge.Step) -> Tensor | float:
        """How many a window holds; a tensor of the task's is not read."""
        if not self._decided:
            self._decide(step.window[0])
        if self.name is None:
            return 0.0
        if self._task_counts:
            return sum(step.items[1:], start=step.items[0])
        return sum(tokens.numel() for batch in step.window if (tokens := first_tensor(batch)) is not None)

    def _decide(self, batch: Any) -> None:
        self._decided = True
        first = first_tensor(batch)
        whole = first is not None and first.ndim == 2 and not (first.is_floating_point() or first.is_complex())
        if self._task_counts or whole:
            self.name = self._given or ("tokens" if whole else "items")
        elif self._given is not None:
            logger.warning(
                "throughput.items=%s has nothing to count: define num_items(self, batch) on the task, which says how "
                "many a batch holds.",
                self._given,
            )


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor in a batch, which is its inputs."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((found for part in batch if (found := first_tensor(part)) is not None), None)
    return None
