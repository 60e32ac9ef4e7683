"""Loader: batches of a map-style dataset, in an order that is a function of (seed, epoch), from any position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from forge.data.iterable import StreamLoader
from forge.data.order import Indices, Order, Sequential, Shuffled, batch_ranges, occurrences
from forge.data.sample_rng import OwnSeed
from forge.data.sample_seeding import Draw, Seeded
from forge.data.sharding import Portion, rank_portions
from forge.data.workers import DATA_TIMEOUT, Pool
from forge.errors import DataError

_OURS = {
    "generator": "pass seed=",
    "timeout": "pass data_timeout=",
    "in_order": "batches out of order cannot be resumed",
}


class Loader(OwnSeed):
    """A torch DataLoader with a repeatable order that resumes at any position and leaves the global RNG unchanged.

    ::

        Loader(dataset, batch_size=64, shuffle=True, num_workers=4)

    `dataset` has a length and indices, or is an iterable dataset; to resume, one of those without `state_dict` and
    `load_state_dict` is read again from the beginning of the epoch. Without a `seed` the loader uses the Trainer's.

    `sampler` is one of forge's orders, `forge.data.Weighted(weights)` or `forge.data.Bucketed(lengths)`; one of torch's
    or of your own, and a `batch_sampler`, are run as a torch DataLoader's would be by the Trainer. Unless the dataset
    is `pure` (draws no random numbers: by this option, by its attribute `pure`, or by its class), python's, numpy's and
    torch's generators are seeded from (seed, epoch, index) before each sample.

    `data_timeout`: seconds without a batch after which a worker counts as hanging. Further options (`collate_fn`,
    `pin_memory`, `prefetch_factor`, `worker_init_fn`, `multiprocessing_context`, ...) are torch.utils.data.DataLoader's
    own; `persistent_workers` is on by default. `batch_size=None` yields single samples.
    """

    def __new__(cls, dataset: Any, *arguments: Any, **options: Any) -> Self:
        if isinstance(dataset, IterableDataset):  # it has another kind of position
            return StreamLoader(dataset, *arguments, **options)  # pyright: ignore[reportReturnType]
        if "batch_sampler" in options or isinstance(options.get("sampler"), Iterable):
            return _sampled(dataset, *arguments, **options)
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        num_workers: int = 0,
        *,
        seed: int | None = None,
        sampler: Order | Iterable[int] | None = None,
        pure: bool | None = None,
        drop_last: bool = False,
        data_timeout: float = DATA_TIMEOUT,
        **options: Any,
    ):
        if hasattr(self, "order"):  # `__new__` has made it, of a sampler of torch's
            return
        name = type(dataset).__name__
        for key, instead in _OURS.items():
            if key in options:
                raise DataError(f"forge.data.Loader has its own {key}: {instead}.")
        if batch_size is not None and batch_size < 1:
            raise DataError(f"forge.data.Loader: batch_size is {batch_size}; it must be at least 1.")
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.order = _chosen_order(dataset, shuffle, sampler)
        self.own_seed = seed
        self._epoch = self._position = 0
        self._step = batch_size or 1
        self._check_sizes(name)
        collate = options.pop("collate_fn", None) or (default_convert if batch_size is None else default_collate)
        source = Seeded(dataset, collate, pure, batched=batch_size is not None)
        self._pool = Pool(source, name, num_workers, data_timeout, **options)
        self.loader = self._pool.loader

    def seek(self, epoch: int, samples: int) -> None:
        """Start the next pass at sample `samples` of epoch `epoch`, which must be the beginning of a batch."""
        if not 0 <= samples <= self.order.samples:
            raise DataError(f"seek: sample {samples} is outside of an epoch of {self.order.samples} samples.")
        self._epoch, self._position = epoch, samples

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of epoch `epoch`."""
        self.seek(epoch, 0)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with this loader."""
        sizes = {"batch_size": self.batch_size, "seed": self.seed, "drop_last": self.drop_last}
        return {**self.order.describe(), **sizes}

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the dataset's indices at these positions of an epoch."""
        return list(_listed(self.order.plan(self.seed, epoch, self._step)[start:stop]))

    def peek(self, places: Sequence[int]) -> Iterator[Any]:
        """Yield the samples at these places of the first epoch, each as a batch of one."""
        return self._fetch(self.order.plan(self.seed, 0, self._step), ((place, place + 1) for place in places))

    def position(self, epoch: int, batches: int) -> int:
        """Return how many samples the first `batches` batches of an epoch hold, before collate_fn."""
        return min(batches * self._step, self.order.samples)

    def __len__(self) -> int:
        return self.order.batches(self._step, self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        return self._fetch(*self._begin())

    def iter_rank(self, data_rank: int, data_world: int) -> Iterator[Portion]:
        """Iterate over one rank's part of every batch; the samples of other ranks are not read."""
        if self.batch_size is None:
            raise DataError(
                f"forge.data.Loader with batch_size=None yields samples of {type(self.dataset).__name__}, which forge "
                "cannot divide among ranks. Pass a batch_size, or a list of batches."
            )
        indices, ranges = self._begin()
        return rank_portions(partial(self._fetch, indices), ranges, data_rank, data_world)

    def _begin(self) -> tuple[Indices, Iterator[tuple[int, int]]]:
        """Return the epoch's indices, and the ranges of its batches from the position on."""
        start, self._position = self._position, 0
        indices = self.order.plan(self.seed, self._epoch, self._step)
        return indices, batch_ranges(self.order.samples, start, self._step, self.drop_last)

    def _fetch(self, indices: Indices, ranges: Iterator[tuple[int, int]]) -> Iterator[Any]:
        seed, epoch = self.seed, self._epoch
        repeats = occurrences(indices) if self.order.repeats else None  # pyright: ignore[reportArgumentType]
        return self._pool.run(_draws(indices, ranges, repeats, seed, epoch), seed + epoch)

    def _check_sizes(self, name: str) -> None:
        if not self.order.samples:
            raise DataError(f"forge.data.Loader: the dataset {name} is empty.")
        self.order.check(_length(self.dataset))
        if self.drop_last and self.order.samples < self._step:
            raise DataError(
                f"forge.data.Loader: {name} has {self.order.samples} samples, less than one batch of {self._step}, and "
                "drop_last=True drops it. Use a smaller batch_size, or leave drop_last off."
            )


def _sampled(dataset: Any, *arguments: Any, seed: int | None = None, data_timeout: float = 0, **options: Any) -> Any:
    """Return a loader over a sampler that is no order of forge's: what the Trainer makes of a torch DataLoader."""
    from forge.data.adapt import adopt

    given = dict(zip(("batch_size", "shuffle", "num_workers"), arguments, strict=False)) | options
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return adopt(DataLoader(dataset, timeout=data_timeout, generator=generator, **given), "")


def _draws(
    indices: Indices, ranges: Iterator[tuple[int, int]], repeats: torch.Tensor | None, seed: int, epoch: int
) -> Iterator[Draw]:
    """Yield one draw per batch. Not a method: torch keeps it, and a cycle with the loader would delay its shutdown."""
    for begin, end in ranges:
        again = None if repeats is None else _listed(repeats[begin:end])
        yield Draw(seed, epoch, _listed(indices[begin:end]), again)


def _chosen_order(dataset: Any, shuffle: bool, sampler: Any) -> Order:
    if sampler is not None:
        if shuffle:
            raise DataError("forge.data.Loader: a sampler is an order already; leave shuffle off.")
        if isinstance(sampler, Order):
            return sampler
        raise DataError(
            f"forge.data.Loader cannot take a {type(sampler).__name__} as sampler: it gives no indices. Pass "
            "forge.data.Weighted(weights), forge.data.Bucketed(lengths), or a sampler of torch's."
        )
    if not hasattr(dataset, "__getitem__") or _length(dataset) is None:
        raise DataError(
            "forge.data.Loader needs a dataset with a length and indices, or a torch IterableDataset; "
            f"{type(dataset).__name__} is neither."
        )
    if not shuffle:
        return Sequential(len(dataset))
    return Shuffled(len(dataset))


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _listed(indices: Any) -> Sequence[int]:
    return list(indices) if isinstance(indices, range) else indices.tolist()
