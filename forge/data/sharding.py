"""Sharding: every rank trains on its part of each global batch, so that all ranks together follow one order.

A batch of n samples is divided into contiguous parts whose sizes differ by one at most. A part of a small last batch
may be empty: its rank then runs a padding batch, one sample of another rank at weight 0, so that every rank makes as
many updates, no sample counts twice and none is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler

from forge.data.accumulation_windows import batch_size
from forge.data.known_streams import dataset_of, divided_by, how_to_divide
from forge.env import Env, map_items
from forge.errors import DataError
from forge.util.digest import digest

CURE = (
    "Sort what is listed, as sorted(os.listdir(folder)), sorted(glob(...)) or sorted(a_set), and seed what is shuffled "
    "or split, as random.Random(0).shuffle(files)"
)
_END = object()


class Portion(NamedTuple):
    """One rank's part of a global batch."""

    batch: Any
    samples: int
    "How many of its samples count; 0 for a padding batch."
    total: int
    "How many samples the global batch has."


class RankWindow(NamedTuple):
    """A window on one of several ranks."""

    batches: list[Any]
    items: list[Any]
    "The weight of each batch on this rank."
    samples: int
    "Samples in the window, over all ranks."
    total: Any
    "The weight of the window, over all ranks."


class Cut(NamedTuple):
    """The range of one rank's part, and how many of its samples count."""

    begin: int
    end: int
    samples: int


def cut(begin: int, end: int, data_rank: int, data_world: int) -> Cut:
    """Return one rank's part of the samples from `begin` to `end`; the first sample as padding if it is empty."""
    size = end - begin
    first, last = begin + size * data_rank // data_world, begin + size * (data_rank + 1) // data_world
    return Cut(first, last, last - first) if last > first else Cut(begin, begin + 1, 0)


def rank_portions(
    fetch: Callable[[Iterator[tuple[int, int]]], Iterator[Any]],
    ranges: Iterator[tuple[int, int]],
    data_rank: int,
    data_world: int,
) -> Iterator[Portion]:
    """Cut the ranges of global batches, fetch one rank's part of each, and count its samples."""
    ahead, ranges = itertools.tee(ranges)
    batches = fetch(cut(begin, end, data_rank, data_world)[:2] for begin, end in ahead)
    counts = ((cut(begin, end, data_rank, data_world).samples, end - begin) for begin, end in ranges)
    return (Portion(batch, *count) for batch, count in zip(batches, counts, strict=True))


class RankLoader:
    """Yields one rank's portions of a loader's global batches; all other attributes are the inner loader's.

    A loader with `iter_rank(data_rank, data_world)` reads only this rank's samples. Of any other loader, every rank
    reads whole batches and cuts them.
    """

    def __init__(self, loader: Any, data_rank: int, data_world: int, stage: str, env: Env | None = None):
        _refuse_divided(loader, stage, data_world if env is None else env.world)
        self.loader, self.data_rank, self.data_world, self.stage = loader, data_rank, data_world, stage
        self._env = env
        self._is_read = False
        if hasattr(type(loader), "_rank_env"):
            loader._rank_env = env

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Portion]:
        if not hasattr(type(self.loader), "iter_rank"):
            return self._cut_batches(iter(self.loader))
        portions = self.loader.iter_rank(self.data_rank, self.data_world)
        drawn = getattr(self.loader, "drawn_order", None)
        if drawn is not None:
            self._compare(drawn, "another order")
        return portions

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "__setstate__"):  # read by copy, before the inner loader is set
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _cut_batches(self, batches: Iterator[Any]) -> Iterator[Portion]:
        is_first, self._is_read = not self._is_read, True
        for number, batch in enumerate(itertools.chain(batches, [_END])):
            # the first of each pass, and in the first pass ever fewer of the later ones
            if number == 0 or (is_first and number & (number - 1) == 0):
                self._compare("" if batch is _END else digest(batch), f"another batch {number}")
            if batch is _END:
                return
            size = batch_size(batch)
            if not size:
                raise DataError(
                    f"The {self.stage} loader yields a {type(batch).__name__}, which cannot be divided among "
                    f"{self.data_world} ranks: its number of samples is not known. Use forge.data.Loader."
                )
            place = cut(0, size, self.data_rank, self.data_world)
            yield Portion(part_of(batch, place, size), place.samples, size)

    def _compare(self, own: str, what: str) -> None:
        """Refuse a loader that draws its order from the process's random numbers, or lists its files in any order."""
        word = int(own[:14] or "0", 16)
        if self._env is None or (most := self._env.all_max([word, -word]))[0] == -most[1]:
            return
        by_rank = self._env.gather(own)
        if not all(by_rank):
            counts = ", ".join(f"rank {rank} has {'more' if each else 'none'}" for rank, each in enumerate(by_rank))
            place = what.removeprefix("another ")
            raise DataError(
                f"The ranks disagree on the number of {self.stage} batches, at {place}: {counts}. "
                "Give every rank the same global batches; forge takes each rank's share of them."
            )
        given = getattr(self.loader, "loader", self.loader)
        rank = next(rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0])
        cure = f"Use forge.data.Loader(shuffle=True), or draw from a generator that is seeded with the epoch. {CURE}"
        raise DataError(
            f"The {self.stage} loader {type(given).__name__} gives {what} on rank {rank} than on rank 0: it draws its "
            "order from random numbers, which differ between ranks, lists its files in another order, or divides its "
            f"data among ranks itself. {how_to_divide(self.loader) or cure}."
        )


def part_of(value: Any, place: Cut, size: int) -> Any:
    """Return one rank's samples of a collated batch: slice what has one entry per sample, keep the rest."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return value[place.begin : place.end] if value.ndim and value.size(0) == size else value
    is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    if is_list and len(value) == size and not any(batch_size([item]) == size for item in value):
        return value[place.begin : place.end]  # one entry per sample: texts, paths, boxes
    part = map_items(value, lambda item: part_of(item, place, size))
    if part is not None:
        return part
    if isinstance(value, Mapping):
        return {key: part_of(item, place, size) for key, item in value.items()}
    raise DataError(
        f"A batch with a {type(value).__name__} in it cannot be divided among ranks. Use forge.data.Loader, which "
        "divides before it collates."
    )


def _refuse_divided(loader: Any, stage: str, world: int) -> None:
    """Refuse a loader that divides its data among ranks itself: it would be divided twice."""
    inner = getattr(loader, "loader", loader)
    samplers = [*getattr(loader, "samplers", ()), inner.sampler if isinstance(inner, DataLoader) else None]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise DataError(
            f"The {stage} loader has a DistributedSampler, but forge divides every batch among the ranks itself. Leave "
            "the sampler out (pass shuffle=True if it shuffled), and use the global batch size."
        )
    dataset = dataset_of(loader)
    cure = divided_by(dataset, world)
    if cure is not None:
        raise DataError(
            f"The {stage} dataset {type(dataset).__name__} divides its samples among the ranks, but forge divides "
            f"every batch itself. {cure}, and use the global batch size."
        )


def rank_window(portions: list[Portion], env: Env, num_items: Callable[[Any], Any] | None) -> RankWindow:
    """Return a rank's window with its weights; only the `num_items` of a task that defines it needs a reduction."""
    batches, samples = [portion.batch for portion in portions], sum(portion.total for portion in portions)
    if num_items is None:
        for portion in portions:
            _refuse_other_size(portion)
        return RankWindow(batches, [portion.samples for portion in portions], samples, samples)
    items = [num_items(portion.batch) if portion.samples else 0 for portion in portions]
    on_host = env.device.type == "cpu"
    counts = [torch.as_tensor(n, dtype=torch.float64).reshape(()) for n in items]
    own = torch.stack(counts).to(env.device, non_blocking=True)
    total = env.sum(own.sum()) * env.data_world / env.world
    if on_host:  # with a total of 0, weigh as one process would
        return RankWindow(batches, own.tolist(), samples, float(total) or None)
    return RankWindow(batches, list(own), samples, total.clamp(min=1e-30))  # 0 items weigh 0, and not 0/0


def _refuse_other_size(portion: Portion) -> None:
    """Refuse a batch whose number of samples changed in collate: ranks compute each other's counts."""
    size = batch_size(portion.batch)
    if size is not None and portion.samples and size != portion.samples:
        raise DataError(
            f"collate_fn turned {portion.samples} samples into {size}: on several ranks forge cannot infer the counts "
            "of the others. Define num_items(batch) on the task, as in `return len(batch[0])`."
        )
