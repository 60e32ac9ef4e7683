"""Adopting what a user passes as a loader: made resumable where that is possible, else named with why it is not."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from forge.data.iterable import StreamLoader
from forge.data.loader import Loader
from forge.data.order import Indices, Order, Sequential, Shuffled, Weighted, digest, epoch_generator, epoch_order
from forge.data.prefetch import DevicePrefetch
from forge.data.sample_rng import OwnSeed
from forge.data.sharding import RankLoader
from forge.data.user_sampler import SampledLoader
from forge.data.windows import batch_size, is_stateful, length_of, set_epoch
from forge.data.workers import DATA_TIMEOUT
from forge.errors import DataError

logger = logging.getLogger("forge")


def adopt(loader: Any, stage: str, allow_inexact: bool = False) -> Any:
    """Return a loader that gives the same samples and, where that is possible, can be continued exactly.

    What can already (it has `seek`, or `state_dict` and `load_state_dict`) is returned as it is. A list of batches and
    a torch DataLoader are wrapped. For anything else `resumable_reason` says why it cannot be continued; with
    `allow_inexact` it is read again from its beginning instead, and what was consumed is dropped.
    """
    if hasattr(loader, "seek") or is_stateful(loader):
        return loader
    if isinstance(loader, (list, tuple)):
        _refuse_several(loader, stage)
        return BatchList(loader) if loader else loader
    if _is_plain_dataloader(loader):
        loader = _adopt_dataloader(loader)
    reason = resumable_reason(loader)
    if reason is None or not allow_inexact:
        return loader
    return Reread(loader, stage, reason)


def _refuse_several(given: Sequence[Any], stage: str) -> None:
    """A list is one of batches; loaders in one, as Lightning takes them, have no names."""
    if not given or not all(isinstance(item, (DataLoader, OwnSeed, SampledLoader, DevicePrefetch)) for item in given):
        return
    count = "1 loader" if len(given) == 1 else f"{len(given)} loaders"
    if stage == "train":
        fix = "Training takes one: join their datasets with torch.utils.data.ConcatDataset."
    else:
        names = ", ".join(f"{chr(97 + i)!r}: ..." for i in range(min(len(given), 3)))
        fix = f"Pass a dict, whose names go into the metrics: {{{names}}}."
    raise DataError(f"{stage} got a {type(given).__name__} of {count}, and a list is one of batches. {fix}")


def resumable_reason(loader: Any) -> str | None:
    """Why a run over this loader cannot be continued exactly, and what to use instead; None where it can."""
    name = type(loader).__name__
    if isinstance(loader, RankLoader):
        return resumable_reason(loader.loader)
    if isinstance(loader, Reread):
        return loader.reason
    if hasattr(loader, "seek") or is_stateful(loader):
        return None
    if isinstance(loader, StreamLoader):
        return (
            f"{type(loader.dataset).__name__} is an iterable dataset that cannot say where it is. Give it state_dict() "
            "and load_state_dict(state), or make it a dataset with a length and indices."
        )
    if isinstance(loader, DataLoader):
        return _dataloader_reason(loader)
    if isinstance(loader, Iterator):
        return f"{name} is an iterator: it can be read once, from its beginning. Pass a forge.data.Loader or a list."
    return (
        f"{name} has neither seek(epoch, samples) nor state_dict() and load_state_dict(state). Give it one of them, or "
        "use forge.data.Loader, forge.data.TensorLoader or a torch DataLoader."
    )


def shares_badly(loader: Any) -> bool:
    """Whether one object cannot serve two stages: it keeps a single position, so a validation would move training's."""
    if isinstance(loader, (DevicePrefetch, Reread, RankLoader)):
        return shares_badly(loader.loader)
    if isinstance(loader, (StreamLoader, Iterator)):
        return True
    return is_stateful(loader) and not hasattr(loader, "seek")


# ---------------------------------------------------------------------------------------------------------------------
# torch's DataLoader.


def _is_plain_dataloader(loader: Any) -> bool:
    """Whether this is torch's DataLoader, and not a subclass that iterates in its own way."""
    kind = type(loader)
    return isinstance(loader, DataLoader) and (kind.__iter__, kind._get_iterator) == (
        DataLoader.__iter__,
        DataLoader._get_iterator,
    )


def _adopt_dataloader(given: DataLoader[Any]) -> Any:
    """The forge loader that is equivalent, or the DataLoader itself where there is none."""
    if length_of(given) == 0 or _dataloader_reason(given) is not None:
        return given
    timeout, options = given.timeout or DATA_TIMEOUT, _options(given)
    if isinstance(given.dataset, IterableDataset):
        seed = {} if given.generator is None else {"seed": given.generator.initial_seed()}
        options |= {"collate_fn": given.collate_fn, "drop_last": given.drop_last, "data_timeout": timeout, **seed}
        return Loader(given.dataset, given.batch_size, num_workers=given.num_workers, **options)
    batches: Any = given.batch_sampler  # where the user passes one, the DataLoader's own sampler and sizes say nothing
    order = order_of(batches.sampler) if type(batches) is BatchSampler else None
    if order is None:
        return SampledLoader(given, timeout, **options)
    generator = getattr(batches.sampler, "generator", None) or given.generator
    return Loader(
        given.dataset,
        batches.batch_size,
        num_workers=given.num_workers,
        seed=None if generator is None else generator.initial_seed(),
        sampler=order,
        drop_last=batches.drop_last,
        data_timeout=timeout,
        collate_fn=given.collate_fn,
        **options,
    )


def _dataloader_reason(given: DataLoader[Any]) -> str | None:
    name = type(given).__name__
    if not _is_plain_dataloader(given):
        return f"{name} iterates in a way of its own. Give it state_dict() and load_state_dict(state)."
    if isinstance(given.dataset, (IterDataPipe, MapDataPipe)):
        return f"{type(given.dataset).__name__} is a DataPipe. Use a Dataset, or an IterableDataset with a state."
    if not given.in_order and given.num_workers:
        return "in_order=False gives batches in the order in which workers finish. Leave it out."
    if length_of(given) is None and not isinstance(given.dataset, IterableDataset):
        sampler = given.batch_sampler if given.batch_sampler is not None else given.sampler
        return (
            f"{type(sampler).__name__} has no length, so an epoch's order cannot be drawn before it begins. Give it "
            "__len__, or use forge.data.Loader with forge.data.Weighted or forge.data.Bucketed."
        )
    return None


def _options(given: DataLoader[Any]) -> dict[str, Any]:
    """The options that mean the same to a forge loader."""
    options: dict[str, Any] = {"pin_memory": given.pin_memory}
    if given.pin_memory_device:
        options["pin_memory_device"] = given.pin_memory_device
    if given.num_workers:
        names = ("prefetch_factor", "persistent_workers", "worker_init_fn", "multiprocessing_context")
        options |= {name: getattr(given, name) for name in names}
    return options


def order_of(sampler: Any) -> Order | None:
    """The order that draws as one of torch's own samplers does; None for any other, subclasses too."""
    kind = type(sampler)
    if kind is SequentialSampler:
        return Sequential(len(sampler))
    if kind is RandomSampler:
        size = len(sampler.data_source)
        if not sampler.replacement and sampler.num_samples == size:
            return Shuffled(size)
        return Drawn(size, sampler.num_samples, sampler.replacement)
    if kind is WeightedRandomSampler:
        return _Reweighted(sampler.weights, sampler.num_samples, sampler.replacement)
    if kind is SubsetRandomSampler:
        return Chosen(sampler.indices)
    if kind is DistributedSampler:
        return Distributed(sampler)
    return None


class Drawn(Order):
    """torch's RandomSampler: `samples` out of `size`, with replacement, or one permutation after the other."""

    kind = "drawn"

    def __init__(self, size: int, samples: int, replacement: bool):
        self.size, self.samples, self.replacement = size, samples, replacement
        self.repeats = replacement or samples > size

    def indices(self, seed: int, epoch: int) -> Indices:
        generator = epoch_generator(seed, epoch)
        if self.replacement:
            return torch.randint(self.size, (self.samples,), generator=generator)
        rounds = -(-self.samples // self.size)
        return torch.cat([torch.randperm(self.size, generator=generator) for _ in range(rounds)])[: self.samples]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "of": self.size, "replacement": self.replacement}


class _Reweighted(Weighted):
    """torch's WeightedRandomSampler, whose weights may be fewer than the dataset's samples."""

    def check(self, length: int | None, batch_size: int, drop_last: bool) -> None:
        pass


class Chosen(Order):
    """torch's SubsetRandomSampler: these indices, shuffled."""

    kind = "chosen"

    def __init__(self, indices: Sequence[int]):
        self.chosen = torch.as_tensor(indices, dtype=torch.int64)
        self.samples = len(self.chosen)
        self.repeats = len(self.chosen.unique()) < self.samples

    def indices(self, seed: int, epoch: int) -> Indices:
        return self.chosen[epoch_order(self.samples, seed, epoch)]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "chosen": digest(self.chosen)}


class Distributed(Order):
    """torch's DistributedSampler, which is a function of its own seed and the epoch already."""

    kind = "distributed"
    repeats = True  # it fills up with samples that came before

    def __init__(self, sampler: DistributedSampler[Any]):
        self.sampler, self.samples = copy.copy(sampler), len(sampler)

    def indices(self, seed: int, epoch: int) -> Indices:
        self.sampler.set_epoch(epoch)
        return torch.tensor(list(self.sampler), dtype=torch.int64)

    def describe(self) -> dict[str, Any]:
        own = {
            "replicas": self.sampler.num_replicas,
            "shuffle": self.sampler.shuffle,
            "sampler_seed": self.sampler.seed,
        }
        return {**super().describe(), **own}


# ---------------------------------------------------------------------------------------------------------------------
# Everything else.


class BatchList:
    """A list of batches: any position is a slice."""

    def __init__(self, batches: Sequence[Any]):
        self.batches = batches
        self._epoch = self._start = 0

    def set_default_seed(self, seed: int) -> None:
        """A list has its order; there is nothing to seed."""

    def seek(self, epoch: int, samples: int) -> None:
        """The next pass begins at this sample, which must be the first of a batch."""
        try:
            self._start = self._edges().index(samples) if samples else 0
        except ValueError:
            raise DataError(
                f"seek: no batch of this list begins at sample {samples}: it is not the list that the run began with."
            ) from None

    def set_epoch(self, epoch: int) -> None:
        """Every epoch of a list is the same."""
        self.seek(epoch, 0)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a run to be continued with this list."""
        edges = self._edges()
        sizes = {"batches": len(self.batches), "samples": edges[-1], "batch_size": edges[1]}
        return {"order": "list", **sizes, "seed": None, "drop_last": False}

    def position(self, epoch: int, batches: int) -> int:
        """How many samples the first `batches` batches hold; one that is not made of tensors counts as one."""
        return self._edges()[batches]

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Positions are indices here."""
        return list(range(start, stop))

    def _edges(self) -> list[int]:
        return list(itertools.accumulate((batch_size(batch) or 1 for batch in self.batches), initial=0))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        return iter(self.batches[start:]) if start else iter(self.batches)


class Reread:
    """A loader that can only be read from its beginning: to go on, it is read again and what is consumed is dropped.

    Positions are counted in batches here, not in samples: how many samples a batch holds may not be known.
    """

    def __init__(self, loader: Any, stage: str, reason: str):
        self.loader, self.stage, self.reason = loader, stage, reason
        self._batches = 0

    def set_default_seed(self, seed: int) -> None:
        """Handed on where the loader takes one."""
        if hasattr(self.loader, "set_default_seed"):
            self.loader.set_default_seed(seed)

    def seek(self, epoch: int, samples: int) -> None:
        """The next pass drops so many batches first (see `position`). What follows may not be what would have come."""
        set_epoch(self.loader, epoch)
        self._batches = samples
        if samples:
            logger.warning(
                "The %s loader %s cannot be continued exactly (allow_inexact): it is read again and its first %d "
                "batches are dropped. %s",
                self.stage,
                type(self.loader).__name__,
                samples,
                self.reason,
            )

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch, where the loader knows of epochs."""
        self.seek(epoch, 0)

    def position(self, epoch: int, batches: int) -> int:
        """Where the first `batches` batches end: after so many batches."""
        return batches

    def fingerprint(self) -> dict[str, Any]:
        """Nothing is known but the number of batches."""
        return {"order": "unknown", "batches": length_of(self.loader)}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        dropped, self._batches = self._batches, 0
        batches = iter(self.loader)
        return itertools.islice(batches, dropped, None) if dropped else batches
