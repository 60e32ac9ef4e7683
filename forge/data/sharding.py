"""Shares: every rank trains on its part of each global batch, so that all ranks together follow one order.

A batch of n samples is divided into contiguous shares whose sizes differ by one at most. A share of a small last batch
may be empty: its rank then runs one sample that belongs to another, at weight 0, so that every rank makes as many
updates, no sample counts twice and none is lost.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler

from forge.data.windows import batch_size
from forge.env import Env
from forge.errors import DataError

Agree = Callable[[Sequence[int]], list[int]]
"""The largest of each number over all ranks: `env.all_max`."""


class Portion(NamedTuple):
    """One rank's share of a global batch."""

    batch: Any
    samples: int
    "How many of its samples count here; 0 where the batch is borrowed."
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
    """From where to where a share goes, and how many of these samples count."""

    begin: int
    end: int
    samples: int


def cut(begin: int, end: int, data_rank: int, data_world: int) -> Cut:
    """A share of the samples from `begin` to `end`; where it would be empty, the first sample is borrowed."""
    size = end - begin
    first, last = begin + size * data_rank // data_world, begin + size * (data_rank + 1) // data_world
    return Cut(first, last, last - first) if last > first else Cut(begin, begin + 1, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """From where to where the batches of an epoch go: any number of them in no memory, and as often as needed."""

    start: int
    stop: int
    size: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((first, min(first + self.size, self.stop)) for first in range(self.start, self.stop, self.size))

    def of(self, data_rank: int, data_world: int) -> Iterator[tuple[int, int]]:
        """The same for one share of every batch."""
        return (cut(begin, end, data_rank, data_world)[:2] for begin, end in self)


def portions(
    batches: Iterator[Any], ranges: Iterable[tuple[int, int]], data_rank: int, data_world: int
) -> Iterator[Portion]:
    """Batches that were read for one share, with how many samples count in each."""
    for batch, (begin, end) in zip(batches, ranges, strict=True):
        yield Portion(batch, cut(begin, end, data_rank, data_world).samples, end - begin)


class RankLoader:
    """A loader of global batches that gives one rank's portions of them; everything else is the inner loader's.

    A loader with `iter_rank(data_rank, data_world)` reads only this rank's samples. Of any other loader, every rank
    reads whole batches and cuts them.
    """

    def __init__(self, loader: Any, data_rank: int, data_world: int, stage: str, agree: Agree | None = None):
        _refuse_divided(loader, stage)
        self.loader, self.data_rank, self.data_world, self.stage = loader, data_rank, data_world, stage
        self._agree = agree

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Portion]:
        if hasattr(type(self.loader), "iter_rank"):
            return self.loader.iter_rank(self.data_rank, self.data_world)
        return self._cut_batches(iter(self.loader))

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "__setstate__"):  # asked for by copy, before there is an inner loader
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _cut_batches(self, batches: Iterator[Any]) -> Iterator[Portion]:
        for number, batch in enumerate(batches):
            size = batch_size(batch)
            if number == 0 and self._agree is not None:
                self._refuse_another_order(batch, self._agree)
            if not size:
                raise DataError(
                    f"The {self.stage} loader gives a {type(batch).__name__}, which cannot be divided among "
                    f"{self.data_world} ranks: forge does not know how many samples it has. Use forge.data.Loader."
                )
            place = cut(0, size, self.data_rank, self.data_world)
            yield Portion(_part(batch, place, size), place.samples, size)

    def _refuse_another_order(self, batch: Any, agree: Agree) -> None:
        """A loader that draws its order from the process's own random numbers gives each rank another one."""
        word = _digest(batch)
        most = agree([word, -word])
        if most[0] != -most[1]:
            given = getattr(self.loader, "loader", self.loader)
            raise DataError(
                f"The {self.stage} loader {type(given).__name__} gives other batches on another rank: it draws "
                "its order from random numbers, of which every rank has its own. Use forge.data.Loader(shuffle=True), "
                "or draw from a generator that is seeded with the epoch."
            )


def _digest(batch: Any) -> int:
    """A number for the first tensor of a batch: another one has another."""
    if isinstance(batch, torch.Tensor):
        plain = torch.view_as_real(batch) if batch.is_complex() else batch
        raw = plain.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return int.from_bytes(hashlib.sha256(raw).digest()[:7])
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for part in parts if (found := _digest(part))), 0)


def _part(value: Any, place: Cut, size: int) -> Any:
    """The samples of a share out of a collated batch: whatever has one entry a sample is sliced, the rest is kept."""
    if isinstance(value, torch.Tensor):
        return value[place.begin : place.end] if value.ndim and value.size(0) == size else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(item, place, size) for item in value))
    if isinstance(value, (list, tuple)):
        if len(value) == size and not any(batch_size([item]) == size for item in value):
            return value[place.begin : place.end]  # one entry a sample: texts, paths, boxes
        return type(value)(_part(item, place, size) for item in value)
    if isinstance(value, MutableMapping):
        part = copy.copy(value)
        for key, item in value.items():
            part[key] = _part(item, place, size)
        return part
    if isinstance(value, Mapping):
        return {key: _part(item, place, size) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        part = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(part, field.name, _part(getattr(value, field.name), place, size))
        return part
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise DataError(
        f"A batch with a {type(value).__name__} in it cannot be divided among ranks. Use forge.data.Loader, which "
        "divides before it collates."
    )


def _refuse_divided(loader: Any, stage: str) -> None:
    """A loader that divides its data among ranks by itself would be divided twice."""
    order = getattr(loader, "order", None)
    inner = getattr(loader, "loader", loader)
    sampler = getattr(inner, "sampler", None) if isinstance(inner, DataLoader) else None
    if isinstance(sampler, DistributedSampler) or getattr(order, "kind", None) == "distributed":
        raise DataError(
            f"The {stage} loader has a DistributedSampler, and forge divides every batch among the ranks itself. Leave "
            "the sampler out (shuffle=True where it shuffled), and give the global batch size."
        )


def rank_window(portions: list[Portion], env: Env, num_items: Callable[[Any], Any] | None) -> RankWindow:
    """Return a rank's window with its weights. Sample counts follow by arithmetic; only the `num_items` of a task that
    defines it costs a reduction."""
    batches, samples = [portion.batch for portion in portions], sum(portion.total for portion in portions)
    if num_items is None:
        for portion in portions:
            _refuse_other_size(portion)
        return RankWindow(batches, [portion.samples for portion in portions], samples, samples)
    items = [num_items(portion.batch) if portion.samples else 0 for portion in portions]
    on_host = env.device.type == "cpu"
    kind = torch.float64 if on_host else torch.float32  # on the host there is no reason to round
    own = torch.stack([torch.as_tensor(n, dtype=kind).reshape(()) for n in items]).to(env.device, non_blocking=True)
    total = env.sum(own.sum()) * env.data_world / env.world
    if on_host:  # a total of 0 divides nothing: weigh as one process would
        return RankWindow(batches, own.tolist(), samples, float(total) or None)
    return RankWindow(batches, list(own), samples, total.clamp(min=1e-30))  # 0 items weigh 0, and not 0/0


def _refuse_other_size(portion: Portion) -> None:
    """Refuse a batch with another number of samples than were read for it: ranks know each other's by arithmetic."""
    size = batch_size(portion.batch)
    if size is not None and portion.samples and size != portion.samples:
        raise DataError(
            f"A batch of {portion.samples} samples came out of its collate_fn with {size}: on several ranks forge "
            "cannot tell how the others' count. Say it yourself: define num_items(batch) on the task, as in "
            "`return len(batch[0])`."
        )
