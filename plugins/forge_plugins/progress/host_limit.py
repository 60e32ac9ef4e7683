"""Find out whether the GPU waits for the host, from a few updates of the run itself.

The host queues kernels and runs ahead of the GPU. If the GPU has finished an update by the time the host has queued the
next one, again and again, then the host is the limit. How long the GPU itself works is measured by letting it pause
while the host queues one whole update: then nothing is left to wait for.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import forge
from forge_plugins.torch_internals import cuda_sleep

logger = logging.getLogger("forge")

FIRST, EVERY = 40, 7
"""The first update that is looked at, and how many later the next one is: not in step with what recurs."""
LOOKS, PAUSES = 8, 3
"""Updates in which the GPU must have been waiting, and updates that it works through after a pause."""
LEAST = 1.3
"""The least factor worth a line."""
DATA = 0.2
"""The share of an update that waiting for data may take: more, and the data are the limit."""
LONGER = 3.0
"""A pause of the GPU, in updates of the host."""


class Gpu:
    """Events and pauses on a CUDA device."""

    def __init__(self, device: torch.device):
        self.device = device
        rate = getattr(torch.cuda.get_device_properties(device), "clock_rate", 2_000_000)
        self._cycles = 1000.0 * rate

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def pause(self, seconds: float) -> None:
        with torch.cuda.device(self.device):
            cuda_sleep(int(seconds * self._cycles))


class HostLimit:
    """Looks at some boundaries of a run and says once if the GPU waits for the host."""

    def __init__(self, gpu: Any, clock: Callable[[], float] = time.perf_counter):
        self._gpu, self._clock = gpu, clock
        self._next, self._misses = FIRST, 0
        self._event: Any = None
        "The end of the update before; in a pause, its start."
        self._from = 0.0
        self._host: list[float] = []
        self._waits: list[float] = []
        self._pairs: list[tuple[Any, Any]] = []

    @classmethod
    def of(cls, trainer: forge.Run) -> HostLimit | None:
        """Return one for a fit on a GPU whose updates are not captured yet."""
        captured = any({"step_capture", "compiled_graphs"} & {*plugin.provides} for plugin in trainer.stack)
        if (
            trainer.verb != "fit"
            or trainer.env.device.type != "cuda"
            or captured
            or torch.version.hip
            or cuda_sleep is None
        ):
            return None
        return cls(Gpu(trainer.env.device))

    def look(self, step: forge.Step) -> HostLimit | None:
        """Look at a boundary; return None when there is nothing more to find out."""
        if step.index < self._next:
            return self
        if self._event is None:  # begin: the next update is looked at
            if len(self._host) == LOOKS:
                self._gpu.pause(LONGER * self._seconds())
            self._event, self._from = self._gpu.mark(), self._clock()
            return self
        event, self._event = self._event, None
        self._next = step.index + EVERY
        if len(self._host) < LOOKS:
            return self._compare(step, event)
        self._pairs.append((event, self._gpu.mark()))
        if len(self._pairs) < PAUSES:
            return self
        return self._tell()

    def _compare(self, step: forge.Step, event: Any) -> HostLimit | None:
        if not event.query():  # the GPU is behind
            self._misses += 1
            return self if self._misses < 2 else None
        self._host.append(self._clock() - self._from)
        self._waits.append(step.data_wait)
        if len(self._host) < LOOKS:
            return self
        return self if statistics.median(self._waits) < DATA * self._seconds() else None

    def _seconds(self) -> float:
        return statistics.median(self._host)

    def _tell(self) -> None:
        self._pairs[-1][1].synchronize()
        works = statistics.median(start.elapsed_time(end) for start, end in self._pairs)
        takes = 1e3 * self._seconds()
        if works > 0 and takes / works >= LEAST:
            text = "The GPU waits for the host: an update takes %.3g ms, and the GPU works for %.3g ms of it. Capture "
            text += "the update, for up to %.1f× the speed (measured on this step): -p cuda_graph"
            logger.info(text, takes, works, takes / works)
