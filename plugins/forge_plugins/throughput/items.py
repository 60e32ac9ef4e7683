"""Items of a batch beside samples: tokens, or what the task counts."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from torch import Tensor

import forge
from forge.util.tensors import tensors_in

logger = logging.getLogger("forge")


class Items:
    """Counts the items of a step. Their name is decided by the first window."""

    def __init__(self, given: str | None, task_counts: bool):
        self.name: str | None = None
        self._given, self._task_counts = given, task_counts
        self._decided = False

    @property
    def candidates(self) -> list[str]:
        """The names that rates of items may have, on any rank."""
        return [f"{name}_per_s" for name in ([self._given] if self._given else ["tokens", "items"])]

    def of(self, step: forge.Step) -> Tensor | float:
        """Return the number of items in a window; a tensor stays unread."""
        if not self._decided:
            self._decide(step.window[0])
        if self.name is None:
            return 0.0
        if self._task_counts:
            return sum(step.items[1:], start=step.items[0])
        return sum(tokens.numel() for batch in step.window for tokens in islice(tensors_in(batch), 1))

    def _decide(self, batch: Any) -> None:
        self._decided = True
        first = next(tensors_in(batch), None)
        whole = first is not None and first.ndim == 2 and not (first.is_floating_point() or first.is_complex())
        if self._task_counts or whole:
            self.name = self._given or ("tokens" if whole else "items")
        elif self._given is not None:
            text = "throughput.items=%s has nothing to count. Define num_items(self, batch) on the task: the number of "
            logger.warning(text + "items in a batch.", self._given)
