"""Prefetching of batches to the device."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import forge
from forge.data.prefetch import DevicePrefetch
from forge.data.protocols import is_live
from forge.errors import RecipeError


class Prefetch(forge.Plugin):
    """Copy batches to a CUDA device ahead of use, from pinned memory on a separate stream.

    The next batches are copied while the device computes. The data and their order do not change. Each batch ahead
    takes memory on the device. On other devices the plugin does nothing.

    When to use it: if the profiler says that a run is transfer-bound. Set `pin_memory=True` on the loader.

    ::

        forge fit quickstart -p prefetch prefetch.depth=3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        depth: int = 2
        "Number of batches to copy ahead."

    config: Config
    provides = ("prefetch",)
    cures = {"transfer": "-p {name}, which copies the next batches while the device computes"}
    observer = True
    effects = ("reads_ahead",)

    def __init__(self, *first: int, **values: int):
        super().__init__(*first, **values)
        if self.config.depth < 1:
            raise RecipeError(f"prefetch.depth is {self.config.depth}; it must be at least 1.")
        self._wrapped: dict[int, DevicePrefetch] = {}

    @forge.hookimpl(wrapper=True)
    def forge_build_loader(self, trainer: forge.Run) -> Generator[None, Any, Any]:
        built = yield
        device = trainer.env.device
        if device.type != "cuda":
            return built
        if isinstance(built, dict):
            return {name: self._ahead(loader, device) for name, loader in built.items()}
        return self._ahead(built, device)

    @forge.hookimpl
    def forge_end(self) -> None:
        self._wrapped.clear()

    def _ahead(self, loader: Any, device: Any) -> Any:
        """Return the loader, prefetched. A loader of two stages stays one object, for the checks that compare them."""
        if not hasattr(loader, "__iter__") or hasattr(loader, "__next__") or isinstance(loader, DevicePrefetch):
            return loader  # not iterable, a one-shot iterator (prefetching would lose data), or prefetched already
        if is_live(loader):
            return loader  # its next batch depends on this update
        return self._wrapped.setdefault(id(loader), DevicePrefetch(loader, device, self.config.depth))
