"""SeekableLoader: the base of loaders over a known number of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from forge.data.sample_rng import OwnSeed
from forge.data.sharding import Portion, rank_portions
from forge.errors import DataError


class SeekableLoader(OwnSeed):
    """Seed, epoch, position and number of batches.

    A subclass sets `order` and defines `_batches(epoch, ranges)` and `sample_indices(epoch, start, stop)`.
    """

    order: str
    "The kind of order, for the fingerprint."

    def __init__(self, samples: int, batch_size: int, drop_last: bool, seed: int | None):
        name = type(self).__name__
        if batch_size < 1:
            raise DataError(f"{name}: batch_size is {batch_size}; it must be at least 1.")
        if drop_last and samples < batch_size:
            raise DataError(
                f"{name}: {samples} samples are less than one batch of {batch_size}, and drop_last drops it. "
                "Use a smaller batch_size, or leave drop_last off."
            )
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last
        self.own_seed = seed
        self._epoch, self._start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch."""
        self.seek(epoch, 0)

    def seek(self, epoch: int, samples: int) -> None:
        """Start the next iteration at sample number `samples` of epoch `epoch`; later ones give whole epochs."""
        if epoch < 0 or not 0 <= samples <= self.samples:
            raise DataError(
                f"{type(self).__name__} cannot seek to sample {samples} of epoch {epoch}: an epoch has {self.samples} "
                "samples. Is this the data that the run started with?"
            )
        self._epoch, self._start = epoch, samples

    def peek(self, places: Iterable[int]) -> Iterator[Any]:
        """Yield the samples at these places of the first epoch, each as a batch of one."""
        return self._batches(0, ((place, place + 1) for place in places))

    def position(self, epoch: int, batches: int) -> int:
        """Return how many samples the first `batches` batches of an epoch hold, before any transform."""
        return min(batches * self.batch_size, self.samples)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume."""
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "order": self.order,
            "drop_last": self.drop_last,
        }

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._epoch, self._ranges())

    def iter_rank(self, data_rank: int, data_world: int) -> Iterator[Portion]:
        """Iterate over one rank's part of every batch; the samples of other ranks are not read."""
        return rank_portions(partial(self._batches, self._epoch), self._ranges(), data_rank, data_world)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Return the ranges of the batches from the position on, read when a pass begins: `seek` may be called before
        its first batch."""
        start, self._start = self._start, 0
        size, stop = self.batch_size, self.samples
        if self.drop_last:
            stop = start + (stop - start) // size * size
        return ((first, min(first + size, stop)) for first in range(start, stop, size))

    def _batches(self, epoch: int, ranges: Iterable[tuple[int, int]]) -> Iterator[Any]:
        raise NotImplementedError
