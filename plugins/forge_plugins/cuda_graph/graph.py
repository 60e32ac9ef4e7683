"""torch's CUDA graph, with recovery from a failed capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


class Graph:
    """A captured sequence of kernels that can be launched again as one."""

    def __init__(self, device: torch.device, pool: Any = None):
        self._device, self._wanted = device, pool
        self._graph = torch.cuda.CUDAGraph()

    @property
    def pool(self) -> Any:
        """Its memory pool; other graphs share it, since they never run at the same time."""
        return self._graph.pool()

    def capture(self, body: Callable[[], None]) -> None:
        """Capture `body` without running it on the device; raise the error of `body` if it fails."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        before, failure, collects = generator.get_state(), None, gc.isenabled()
        # pinned memory that is freed during a capture, after use on its stream, leaves torch's host allocator with an
        # event that it can never query: from then on every allocation of pinned memory in the process fails
        gc.collect()
        gc.disable()
        try:
            # other threads (a loader, a checkpoint writer) may keep using CUDA
            with torch.cuda.graph(self._graph, pool=self._wanted, capture_error_mode="thread_local"):
                try:
                    body()
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as error:
            # a failed capture leaves the generator in capture state: replace its state
            afresh = torch.Generator(self._device)
            afresh.set_state(before)
            generator.graphsafe_set_state(afresh.graphsafe_get_state())
            raise failure or error from None
        finally:
            if collects:
                gc.enable()

    def replay(self) -> None:
        self._graph.replay()
