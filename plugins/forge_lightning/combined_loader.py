"""Several training loaders as one, as Lightning combines them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge.data.accumulation_windows import length_of
from forge.errors import DataError


class CombinedTrainLoader:
    """Batches of several loaders side by side, in the form in which the loaders were given; the longest decides the
    length, and shorter ones begin again: Lightning's mode `max_size_cycle`."""

    def __init__(self, loaders: Any):
        self.loaders = loaders
        self.parts = list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)
        if not self.parts:
            raise DataError("train_dataloader returned no loader.")

    def __len__(self) -> int:
        lengths = [length_of(loader) for loader in self.parts]
        if None in lengths:
            raise TypeError("a loader without a length")
        return max(length for length in lengths if length is not None)

    def __iter__(self) -> Iterator[Any]:
        running = [iter(loader) for loader in self.parts]
        done = [False] * len(running)
        while True:
            batch = []
            for i, loader in enumerate(self.parts):
                try:
                    item = next(running[i])
                except StopIteration:
                    done[i] = True
                    if all(done):
                        return
                    running[i] = iter(loader)
                    item = next(running[i], None)
                batch.append(item)
            yield self._shaped(batch)

    def _shaped(self, batch: list[Any]) -> Any:
        if isinstance(self.loaders, Mapping):
            return dict(zip(self.loaders, batch, strict=True))
        return type(self.loaders)(batch) if type(self.loaders) in (list, tuple) else batch
