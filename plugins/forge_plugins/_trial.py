"""Running something of a step beforehand, without a trace in the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import forge
from forge.seeding import RNGState
from forge_plugins._batch_statistics import kept_buffers


@contextmanager
def untouched(trainer: forge.Trainer) -> Iterator[None]:
    """Whatever runs meanwhile leaves the random numbers and the task's buffers as they were."""
    device = trainer.env.device
    rng = RNGState.capture(device)
    try:
        with kept_buffers(trainer.task):
            yield
    finally:
        rng.restore(device)
