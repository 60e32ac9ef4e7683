"""Inspect one step of each optimizer: its FLOPs, and the tensors kept for backward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

import forge
from forge_plugins.throughput.flops import Count, Counting, graphs_compiled, is_compiled, probe
from forge_plugins.throughput.memory_use import Saved

logger = logging.getLogger("forge")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepInspection:
    """Inspects the second step of each optimizer; the first may still compile."""

    def __init__(self, trainer: forge.Run, flops: bool, activations: bool):
        self.counts: dict[str | None, tuple[Count, float]] = {}
        "By optimizer: the FLOPs of a window, and its samples."
        self.activations: int | None = None
        "Most bytes kept for backward; None before the inspection, and if unknown."
        self.fresh = False
        "Whether counts are new and not logged yet."
        self._trainer, self._flops, self._activations = trainer, flops, activations
        self._turns: Counter[str | None] = Counter()
        self._graphs = graphs_compiled() if flops or activations else 0

    def at(self, step: forge.Step) -> AbstractContextManager[None] | None:
        """Return the context for this turn of an optimizer, if it is inspected."""
        self._turns[step.name] += 1
        if self._turns[step.name] != 2 or not (self._flops or self._activations):
            return None
        return self._into(step)

    def flops(self, step: forge.Step) -> float | None:
        """Return the FLOPs of this turn, scaled from the inspected window by samples."""
        counted = self.counts.get(step.name)
        return None if counted is None else counted[0].total * step.samples / counted[1]

    @property
    def dtype(self) -> str | None:
        """The type of most FLOPs."""
        together = sum((count.by_dtype for count, _ in self.counts.values()), start=Counter[str]())
        return Count(together).dtype

    @contextmanager
    def _into(self, step: forge.Step) -> Iterator[None]:
        if is_compiled(self._trainer, self._graphs):
            if self._flops:
                self._probe(step)
            yield
            return
        with ExitStack() as around:
            saved = around.enter_context(Saved(self._trainer.task)) if self._activations else None
            counting = around.enter_context(Counting()) if self._flops else None
            yield
        if saved is not None and saved.peak is not None:
            self.activations = max(saved.peak, self.activations or 0)
        if counting is not None:
            self._keep(step, counting.count, step.samples)

    def _probe(self, step: forge.Step) -> None:
        """Count one micro-batch with fake tensors, for the whole window."""
        try:
            providers = [plugin for plugin in self._trainer.stack if "autocast" in plugin.provides]
            count = probe(step, DTYPES.get(getattr(providers[0], "dtype", "")) if providers else None)
        except Exception as error:  # for example a task that needs real numbers
            said = str(error).strip().partition("\n")[0]
            text = "throughput: the FLOPs of %s are unknown: it is compiled, where nothing can be counted, and a copy "
            text += "of the task with fake tensors does not run (%s: %s)."
            logger.warning(text, type(self._trainer.task).__name__, type(error).__name__, said)
            return
        self._keep(step, count, step.samples / len(step.window))

    def _keep(self, step: forge.Step, count: Count, samples: float) -> None:
        self.counts[step.name] = (count, max(samples, 1))
        self.fresh = True
