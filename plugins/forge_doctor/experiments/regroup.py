"""Regroup: batches of chosen samples, put together as the loader does it, so that lengths, order and offsets are right.

Where samples cannot be read by index, or must not be read, the rows of a batch stand for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge.rng import reseed
from forge.util.walk import walk
from forge_doctor.experiments.intervene import parts, replaced, with_rows_changed
from forge_doctor.patient import SEED, Patient, are_samples
from forge_doctor.stored import collate_of, indexed


class SampleGroup:
    """As many samples as a batch has, and batches of any of them."""

    def __init__(self, patient: Patient, batch: Any, items: list[Any], collate: Callable[[list[Any]], Any] | None):
        self.size = len(items) or batch_size(batch) or 0
        self._patient, self._batch, self._items, self._collate = patient, batch, items, collate

    @property
    def is_read(self) -> bool:
        """Whether samples were read one by one, rather than taken for the rows of a batch."""
        return self._collate is not None

    def take(self, places: Sequence[int]) -> Any:
        """The batch of the samples at these places, in this order."""
        if self._collate is None:
            return with_rows_changed(self._batch, self.size, lambda x: x[list(places)])
        return self._collated([self._items[i] for i in places])

    def _collated(self, items: list[Any]) -> Any:
        assert self._collate is not None
        reseed(SEED)
        return self._patient.trainer.env.move(self._collate(copy.deepcopy(items)))

    def turned(self) -> Any:
        """The batch in reverse order; None where the loader's collate gives it an order of its own."""
        batch, back = self.take(range(self.size)), self.take(range(self.size)[::-1])
        pairs = zip(parts(batch).values(), parts(back).values(), strict=True)
        return back if all(x.ndim and len(x) == self.size and _equal(x.flip(0), y) for x, y in pairs) else None

    def with_others(self, places: Sequence[int]) -> tuple[Any, Tensor | None]:
        """The batch with other samples at these places, and which of its rows stayed; None where that is not plain."""
        if self._collate is None:
            batch, count = self.take([places[0] if i in places else i for i in range(self.size)]), None
        else:
            items = [self._other(i, places) if i in places else item for i, item in enumerate(self._items)]
            batch = self._collated(items)
            count = sum(not _are_equal(a, b) for a, b in zip(items, self._items, strict=True))
        whole = self.take(range(self.size))
        stayed = torch.ones(self.size, dtype=torch.bool)
        for x, y in zip(parts(whole).values(), parts(batch).values(), strict=True):
            if x.shape != y.shape:
                return batch, None
            if x.ndim and len(x) == self.size:
                stayed &= _same(x, y).reshape(self.size, -1).all(1).cpu()
        touched = int((~stayed).sum())
        is_plain = 0 < touched < self.size and count in (None, touched)  # else rows are no samples, or move
        return batch, stayed if is_plain else None

    def _other(self, i: int, places: Sequence[int]) -> Any:
        """Another sample of the same shapes, or this one read backwards: lengths, and so places in the batch, stay."""
        shapes = [{path: x.shape for path, x in _arrays(item).items()} for item in self._items]
        same = next((j for j in reversed(places) if j != i and shapes[j] == shapes[i]), None)
        if same is not None:
            return self._items[same]
        changes: dict[int, Any] = {}
        for path, x in _arrays(self._items[i]).items():
            theirs = [shape[path] for shape in shapes if path in shape and len(shape[path]) == x.ndim]
            varied = tuple(dim for dim in range(x.ndim) if len({shape[dim] for shape in theirs}) > 1)
            changes[id(x)] = x.flip(varied) if isinstance(x, Tensor) else np.flip(x, varied).copy()
        return replaced(self._items[i], changes)


def group_of(patient: Patient, stage: str = "train") -> SampleGroup | None:
    """Samples of a stage, read once; None where they cannot be told apart."""
    if stage not in patient.groups:
        patient.groups[stage] = _read(patient, stage) or _of_rows(patient, stage)
    return patient.groups[stage]


def _read(patient: Patient, stage: str) -> SampleGroup | None:
    loader = patient.loaders[stage] if patient.reads else None
    dataset, collate = indexed(loader), collate_of(loader)
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or (len(next(iter(copy.deepcopy(sampler)))) if sampler else 0)
    if dataset is None or collate is None or not 1 < size <= len(dataset):
        return None
    size = min(size, batch_size(patient.batches[0]) or size)
    reseed(SEED)
    items = [dataset[i] for i in range(0, len(dataset), len(dataset) // size)][:size]
    return SampleGroup(patient, None, items, collate)


def _of_rows(patient: Patient, stage: str) -> SampleGroup | None:
    batch = next(iter(dict(patient.stages).get(stage, [])), None)
    return SampleGroup(patient, batch, [], None) if batch is not None and are_samples(batch) else None


def _arrays(item: Any) -> dict[str, Any]:
    """The arrays of a sample of any kind, by where they stand in it."""
    return {path: x for path, x in walk({"item": item}) if isinstance(x, (Tensor, np.ndarray)) and x.ndim}


def _are_equal(a: Any, b: Any) -> bool:
    pairs = zip(_arrays(a).values(), _arrays(b).values(), strict=True)
    return a is b or all(_equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(_same(x, y).all())


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | ((x != x) & (y != y))
