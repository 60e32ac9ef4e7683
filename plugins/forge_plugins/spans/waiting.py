"""Find out whether the GPU waits for the host, from a few updates of the run itself.

The host queues kernels and runs ahead of the GPU. Where the GPU has finished an update by the time the host has queued
the next one, the host is the limit. How long the GPU itself works is measured by letting it pause while the host queues
one whole update: then nothing is left to wait for.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

import forge
from forge_plugins.torch_internals import cuda_sleep

FIRST, EVERY = 40, 7
"""The first update that is looked at, and how many later the next one is: not in step with what recurs."""
PAUSES, MISSES = 3, 2
"""Updates that the GPU works through after a pause; and looks at which it was busy, or data were waited for, that end
the search."""
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


class WaitingGpu:
    """Looks at some boundaries of a run. `works` is what the GPU works in an update, in seconds, once it is known."""

    def __init__(self, gpu: Any):
        self._gpu, self._next, self._misses = gpu, FIRST, 0
        self._event: Any = None
        "The end of an update."
        self._paused: Any = None
        "The end of a pause."
        self._pairs: list[tuple[Any, Any]] = []
        self.works: float | None = None

    @classmethod
    def of(cls, trainer: forge.Run) -> WaitingGpu | None:
        """Return one for a fit on a GPU whose updates are not captured yet."""
        captured = any({"step_capture", "compiled_graphs"} & {*plugin.provides} for plugin in trainer.stack)
        on_cuda = trainer.verb == "fit" and trainer.env.device.type == "cuda" and not torch.version.hip
        return cls(Gpu(trainer.env.device)) if on_cuda and not captured and cuda_sleep is not None else None

    def look(self, step: forge.Step, usual: float) -> bool:
        """Look at a boundary, where an update usually takes the host so many seconds; return whether to go on."""
        if step.index < self._next:
            return True
        if self._paused is not None:
            self._pairs.append((self._paused, self._gpu.mark()))
            self._paused, self._next = None, step.index + EVERY
            return len(self._pairs) < PAUSES or self._conclude()
        event, self._event = self._event, None
        if event is None:
            self._event = self._gpu.mark()
        elif event.query() and step.data_wait < DATA * usual:
            self._gpu.pause(LONGER * usual)
            self._paused = self._gpu.mark()
        else:
            self._misses, self._next = self._misses + 1, step.index + EVERY
            if not event.query():
                self.works = math.inf  # all of the time, whatever the host takes to queue an update
        return self._misses < MISSES

    def _conclude(self) -> bool:
        self._pairs[-1][1].synchronize()
        self.works = statistics.median(start.elapsed_time(end) for start, end in self._pairs) / 1e3
        return False

    def sentence(self, usual: float) -> str:
        """What to say of a GPU that works for a part of an update; empty if it does not wait."""
        if not self.works or usual / self.works < LEAST:
            return ""
        return (
            f"The GPU waits for the host: an update takes {1e3 * usual:.3g} ms, and the GPU works for "
            f"{1e3 * self.works:.3g} ms of it. Capture the update, for up to {usual / self.works:.1f}× the speed "
            "(measured on this step): -p cuda_graph"
        )
