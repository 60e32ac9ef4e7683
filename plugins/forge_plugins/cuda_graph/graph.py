"""torch's CUDA graph, and what it takes to leave one half-made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and none until the end. Pinned memory that is freed during a capture, after use on the
    capturing stream, leaves torch's host allocator with an event that it can never query: from then on every
    allocation of pinned memory in the process fails."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graph:
    """Kernels that were given to the device once, and can be given again as one."""

    def __init__(self, device: torch.device, pool: Any = None):
        self._device, self._wanted = device, pool
        self._graph = torch.cuda.CUDAGraph()

    @property
    def pool(self) -> Any:
        """Its memory, for other graphs to share: they never run at the same time."""
        return self._graph.pool()

    def capture(self, body: Callable[[], None]) -> None:
        """Run `body` without running anything on the device. Raises what `body` raised, where that broke it off."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        before, failure = generator.get_state(), None
        try:
            # other threads (a loader's, a checkpoint's writer) may go on with what they do
            with (
                without_garbage_collection(),
                torch.cuda.graph(self._graph, pool=self._wanted, capture_error_mode="thread_local"),
            ):
                try:
                    body()
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as error:
            # a capture that broke off leaves the generator waiting for its end: let it go on from a state of its own
            afresh = torch.Generator(self._device)
            afresh.set_state(before)
            generator.graphsafe_set_state(afresh.graphsafe_get_state())
            raise failure or error from None

    def replay(self) -> None:
        self._graph.replay()
