"""SeekableLoader: what loaders over a known number of samples share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from forge.data.sample_rng import OwnSeed
from forge.data.sharding import Portion, Ranges, portions
from forge.errors import DataError


class SeekableLoader(OwnSeed):
    """Seed, epoch, the place to begin, and the count of batches.

    A subclass sets `order` and gives `_batches(epoch, ranges)` and `sample_indices(epoch, start, stop)`.
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
                "Take a smaller batch_size, or leave drop_last off."
            )
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last
        self.own_seed = seed
        self._epoch, self._start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration gives this epoch from its beginning."""
        self.seek(epoch, 0)

    def seek(self, epoch: int, samples: int) -> None:
        """The next iteration gives epoch `epoch` from its sample number `samples` on; those after it, whole epochs."""
        if epoch < 0 or not 0 <= samples <= self.samples:
            raise DataError(
                f"{type(self).__name__} cannot seek to sample {samples} of epoch {epoch}: an epoch has {self.samples} "
                "samples. Is this the data that the run was started with?"
            )
        self._epoch, self._start = epoch, samples

    def position(self, epoch: int, batches: int) -> int:
        """How many samples the first `batches` batches of an epoch hold, whatever a transform makes of them."""
        return min(batches * self.batch_size, self.samples)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a run to be continued."""
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
        """One share of every batch from here on; the samples of other shares are not read."""
        ranges = self._ranges()
        return portions(self._batches(self._epoch, ranges.of(data_rank, data_world)), ranges, data_rank, data_world)

    def _ranges(self) -> Ranges:
        """Where the batches are from the position on; taken when a pass begins, because `seek` may be called before
        its first batch."""
        start, self._start = self._start, 0
        stop = self.samples
        if self.drop_last:
            stop = start + (stop - start) // self.batch_size * self.batch_size
        return Ranges(start, stop, self.batch_size)

    def _batches(self, epoch: int, ranges: Iterable[tuple[int, int]]) -> Iterator[Any]:
        raise NotImplementedError
