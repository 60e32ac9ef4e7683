"""The order of an epoch: a pure function of (seed, epoch), drawn from a private generator.

An `Order` defines which samples an epoch holds, and in which order, so a loader can start anywhere by slicing. To write
your own, subclass it: set `kind` and `samples`, and return indices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from forge.errors import DataError

Indices = torch.Tensor | range


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a private generator for this epoch; the global RNG is unchanged."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63)


def epoch_order(length: int, seed: int, epoch: int) -> torch.Tensor:
    """Return a permutation of `range(length)` that depends only on the arguments; the global RNG is unchanged."""
    return torch.randperm(length, generator=epoch_generator(seed, epoch))


class Order:
    """Which samples an epoch holds, and in which order: a pure function of (seed, epoch)."""

    kind: str
    "The name of the order in a fingerprint."
    samples: int
    "How many samples an epoch has."
    repeats: bool = False
    "Whether a sample can occur more than once in an epoch; each time it is then augmented differently."

    def indices(self, seed: int, epoch: int) -> Indices:
        """Return the dataset's indices in the order of this epoch: `samples` of them."""
        raise NotImplementedError

    def plan(self, seed: int, epoch: int, batch_size: int) -> Indices:
        """Return the whole epoch. Orders that group samples into batches override this."""
        return self.indices(seed, epoch)

    def batches(self, batch_size: int, drop_last: bool) -> int:
        """Return how many batches an epoch has; the same number in every epoch."""
        return self.samples // batch_size if drop_last else math.ceil(self.samples / batch_size)

    def check(self, length: int | None) -> None:
        """Refuse a dataset that this order does not fit."""

    def describe(self) -> dict[str, Any]:
        """Return what must be equal for two orders to be the same, as plain data."""
        return {"order": self.kind, "samples": self.samples}


class Sequential(Order):
    """Every sample once, in the order of the dataset."""

    kind = "sequential"

    def __init__(self, samples: int):
        self.samples = samples

    def indices(self, seed: int, epoch: int) -> Indices:
        return range(self.samples)


class Shuffled(Order):
    """Every sample once, shuffled again in each epoch."""

    kind = "shuffled"

    def __init__(self, samples: int):
        self.samples = samples

    def indices(self, seed: int, epoch: int) -> Indices:
        return epoch_order(self.samples, seed, epoch)


class Weighted(Order):
    """Samples drawn in proportion to their weights: `Loader(dataset, 64, sampler=Weighted(weights))`.

    An epoch has `samples` of them (by default one per weight). With `replacement` a sample can occur more than once,
    augmented differently each time; without, heavier samples tend to come earlier. Weights need not sum to one.
    """

    kind = "weighted"

    def __init__(
        self, weights: Sequence[float] | torch.Tensor, samples: int | None = None, replacement: bool = True
    ) -> None:
        self.weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        if self.weights.ndim != 1 or not len(self.weights):
            raise DataError(f"Weighted needs one weight per sample; got the shape {tuple(self.weights.shape)}.")
        bad = ~(torch.isfinite(self.weights) & (self.weights >= 0))
        if bad.any():
            where = int(bad.nonzero()[0])
            raise DataError(
                f"Weighted: the weight of sample {where} is {float(self.weights[where])}; it must be finite and not "
                "negative."
            )
        positive = int((self.weights > 0).sum())
        self.samples = len(self.weights) if samples is None else samples
        self.replacement = self.repeats = replacement
        if not positive:
            raise DataError("Weighted: every weight is zero; at least one must be positive.")
        if self.samples < 1:
            raise DataError(f"Weighted: samples={samples}; an epoch needs at least 1.")
        if not replacement and self.samples > positive:
            raise DataError(
                f"Weighted: {self.samples} samples without replacement, but only {positive} have a weight above zero. "
                f"Set samples={positive} or less, or replacement=True."
            )

    def check(self, length: int | None) -> None:
        if length is not None and length != len(self.weights):
            raise DataError(f"Weighted has {len(self.weights)} weights, but the dataset has {length} samples.")

    def indices(self, seed: int, epoch: int) -> Indices:
        generator = epoch_generator(seed, epoch)
        if self.replacement:  # not torch.multinomial, which takes at most 2**24 weights
            edges = self.weights.cumsum(0)
            points = torch.rand(self.samples, generator=generator, dtype=torch.float64) * edges[-1]
            return torch.searchsorted(edges, points, right=True).clamp_(max=int(self.weights.nonzero()[-1]))
        # an exponential race: the first to arrive is drawn first, in proportion to its rate
        arrivals = torch.empty_like(self.weights).exponential_(generator=generator) / self.weights
        return arrivals.argsort(stable=True)[: self.samples]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "replacement": self.replacement, "weights": checksum(self.weights)}


class Bucketed(Order):
    """Batches of samples of similar length, to pad little: `Loader(dataset, 32, sampler=Bucketed(lengths))`.

    Every sample occurs exactly once. Batches have the loader's size: the epoch is shuffled, sorted by length within
    pools of `pool` batches, cut, and the batches are shuffled; a random rest that does not fill a batch comes last.
    """

    kind = "bucketed"

    def __init__(self, lengths: Sequence[int] | torch.Tensor, pool: int = 100) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        self.samples, self.pool = len(self.lengths), pool
        if self.lengths.ndim != 1 or not self.samples:
            raise DataError(f"Bucketed needs one length per sample; got the shape {tuple(self.lengths.shape)}.")
        if pool < 1:
            raise DataError(f"Bucketed: pool={pool}; it must be at least 1 batch.")

    def check(self, length: int | None) -> None:
        if length is not None and length != self.samples:
            raise DataError(f"Bucketed has {self.samples} lengths, but the dataset has {length} samples.")

    def plan(self, seed: int, epoch: int, batch_size: int) -> Indices:
        generator = epoch_generator(seed, epoch)
        shuffled = torch.randperm(self.samples, generator=generator)
        full = self.samples // batch_size
        filled, rest = shuffled[: full * batch_size], shuffled[full * batch_size :]
        pools = [self._sorted(part) for part in filled.split(self.pool * batch_size)]
        if not pools:
            return rest
        batches = torch.cat(pools).view(full, batch_size)[torch.randperm(full, generator=generator)]
        return torch.cat([batches.view(-1), rest])

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pool": self.pool, "lengths": checksum(self.lengths)}

    def _sorted(self, indices: torch.Tensor) -> torch.Tensor:
        return indices[self.lengths[indices].argsort(stable=True)]


def occurrences(indices: torch.Tensor) -> torch.Tensor:
    """Return for each position how often its index occurred before: 0, 0, 1 for 7, 4, 7."""
    ordered, positions = indices.sort(stable=True)
    starts = torch.searchsorted(ordered, ordered, right=False)
    counts = torch.empty_like(indices)
    counts[positions] = torch.arange(len(indices)) - starts
    return counts


def batch_ranges(samples: int, start: int, batch_size: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """Return the range of each batch from the position `start` on, which must be the beginning of one."""
    if (start % batch_size and start != samples) or not 0 <= start <= samples:
        raise DataError(
            f"seek: no batch begins at sample {start} of an epoch of {samples} (batches have {batch_size} samples). "
            "Use the batch size that the run began with."
        )
    end = samples - samples % batch_size if drop_last else samples
    return ((begin, min(begin + batch_size, end)) for begin in range(start, end, batch_size))


def checksum(values: torch.Tensor) -> str:
    """Return the checksum by which a checkpoint knows an order."""
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
