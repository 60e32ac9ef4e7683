"""Storage: change single numbers of the arrays that a dataset keeps, and see which samples change with them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_doctor.deadline import Deadline
from forge_doctor.experiments.reading import places
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, tensors
from forge_doctor.stored import Array, Sample, arrays, count_of, indexed, read

SAMPLES, ELEMENTS, LOOKS = 8, 24, 3
"""Samples of a split that are followed, numbers that each is made of, and readings with other random numbers."""
MOST_ARRAYS, MOST_NUMBERS, MOST_HOLDERS = 12, 5_000_000, 100
"""Arrays that are followed, numbers of each, and samples of train that hold some of them."""
SECONDS = 2.0
"""For following samples, and for reading those of train."""
MORE, LEAST = 3.0, 1e-3
"""By how much a number moves a target more than the input that is its own, and the least motion that counts."""
GLOBAL = 0.5
"""The share of an array, or of the samples, from which a number stands for all of them."""


class StoredArray:
    """An array of a dataset, of which numbers are changed while samples are read."""

    def __init__(self, value: Array):
        self.value = torch.as_tensor(value).detach().view(-1)
        self.before, self.size = self.value.clone(), len(self.value)
        if self.value.is_floating_point():
            noise = torch.randn(self.size, generator=torch.Generator().manual_seed(SEED))
            self.other = self.before + (noise * self.before.double().nan_to_num().std()).to(self.before)
        else:  # a value that others have: it may be an index, or a class
            most = self.before.max()
            self.other = torch.where(self.before == most, self.before.min(), most)

    def changed(self, places: Any, call: Callable[[], Any]) -> Any:
        """Call a function while the numbers at these places, a slice or a list, are others."""
        self.value[places] = self.other[places]
        try:
            return call()
        finally:
            self.value[places] = self.before[places]


def _first(moves: Callable[[slice], bool], size: int, last: bool = False) -> int:
    """The first number, or the last one, whose change moves something."""
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        moved = moves(slice(middle, size)) if last else moves(slice(0, middle))
        low, high = (middle, high) if moved == last else (low, middle)
    return low


def _motion(before: Sample, after: Sample, places: set[int]) -> float:
    """By how much the numbers at some places of a sample change, at most, in deviations of the sample."""
    most = 0.0
    for place in places:
        x, y = before[place].double(), after[place].double()
        if x.shape != y.shape:
            return 1.0
        if x.numel():
            scale = float(x.std()) if x.numel() > 1 else 0.0
            most = max(most, float((x - y).abs().nan_to_num().max()) / (scale or 1.0))
    return most


def made_of(patient: Patient) -> Iterator[Finding]:
    """What a target is made of must neither be in its own input, spread over it, nor in samples of the other split."""
    (inputs, asked), parts = places(patient), len(tensors(patient.batches[0]))
    if not asked or not inputs:
        return
    within, loaders = Deadline(SECONDS, time.process_time), _copies(patient)
    for split, loader in loaders.items():
        count = count_of(loader)
        if count < 20 or len(read(loader, 0, SEED)) != parts:
            continue
        chosen = [i * count // SAMPLES for i in range(SAMPLES)]
        held = {path: value for path, value in arrays(loader).items() if _may_change(value)}
        for path in sorted(held, key=lambda path: -_size(held[path]))[:MOST_ARRAYS]:
            if within.is_over:
                return
            stored = StoredArray(held[path])
            found = {}
            for i in chosen:
                own = None if within.is_over else _own(stored, loader, i, inputs, asked)
                found |= {} if own is None else {i: own}
            smeared = [i for i, (_, is_smeared) in found.items() if is_smeared]
            if len(smeared) >= SAMPLES // 2:
                text = (
                    f"Numbers of {_named(path)} that only the target of a sample holds change all of "
                    f"its input ({len(smeared)} of {SAMPLES} samples of {split}): what is to be predicted is in the "
                    "statistics of the input."
                )
                cure = "Compute means, deviations and filters from the input alone, not from the target's stretch."
                yield Finding("leakage", text, split, {"array": path, "samples": smeared}, cure=cure)
            if split == "val":
                yield from _shared(loaders, stored, path, found, asked)


def _copies(patient: Patient) -> dict[str, Any]:
    """Copies of the datasets, which share what they shared: one may keep what it once read."""
    given = {s: x for s, x in patient.loaders.items() if indexed(x) is not None and arrays(x)}
    with suppress(Exception):  # a file, or a connection
        copied = copy.deepcopy([loader.dataset for loader in given.values()])
        return {split: SimpleNamespace(dataset=dataset) for split, dataset in zip(given, copied, strict=True)}
    return {}


def _read(loader: Any, index: int, seed: int = SEED) -> Sample:
    """A sample that stays as it is when the array changes that it is a view of."""
    return tuple(x.clone() for x in read(loader, index, seed))


def _named(path: str) -> str:
    return path.partition("loader.")[2] or path


def _may_change(value: Array) -> bool:
    """Whether an array can be changed in place, number by number."""
    if isinstance(value, np.ndarray):
        is_free = value.flags.writeable and value.flags.c_contiguous and value.dtype.isnative
    else:
        is_free = value.is_contiguous() and value.device.type == "cpu" and not value.is_complex()
    return is_free and value.dtype not in (torch.bool, np.bool_) and 20 <= _size(value) <= MOST_NUMBERS


def _size(value: Array) -> int:
    return value.numel() if isinstance(value, Tensor) else value.size


def _own(
    stored: StoredArray, loader: Any, index: int, inputs: set[int], asked: set[int]
) -> tuple[list[int], bool] | None:
    """The numbers that a target is made of and its input is not; and whether those change the input all the same."""
    plain = [_read(loader, index, SEED + k) for k in range(LOOKS)]

    def motions(places: Any, k: int = 0) -> tuple[float, float]:
        now = stored.changed(places, lambda: _read(loader, index, SEED + k))
        return _motion(plain[k], now, inputs), _motion(plain[k], now, asked)

    moves = lambda places: max(motions(places)) > 0  # noqa: E731
    if not moves(slice(None)) or not motions(slice(None))[1]:
        return None
    begin, end = _first(moves, stored.size), _first(moves, stored.size, last=True)
    if end - begin > GLOBAL * stored.size:
        return None  # each number is in each sample, as in a mean over all of them
    step = max(1, (end - begin + 1) // ELEMENTS)
    rows = {e: [motions([e], k) for k in range(LOOKS)] for e in range(begin, end + 1, step)}
    of_target = [e for e, each in rows.items() if all(y > MORE * x and y > 0 for x, y in each)]
    of_input = [e for e, each in rows.items() if any(x > MORE * y and x > 0 for x, y in each)]
    is_smeared = bool(of_input) and len(of_target) >= 2 and all(x > LEAST for e in of_target for x, _ in rows[e])
    return (of_target, is_smeared) if of_target else None


def _shared(
    loaders: dict[str, Any], stored: StoredArray, path: str, found: dict[int, tuple[list[int], bool]], asked: set[int]
) -> Iterator[Finding]:
    """Samples of train that hold numbers which targets of val are made of, and are no copies of these targets."""
    train, val = loaders.get("train"), loaders["val"]
    if len(found) < SAMPLES // 2 or not any(_overlap(stored.value, other) for other in arrays(train).values()):
        return
    wanted = {i: own[len(own) // 2] for i, (own, _) in found.items()}
    within, count = Deadline(SECONDS, time.process_time), count_of(train)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED)).tolist()
    plain: dict[int, Sample] = {}
    for i in order:
        plain[i] = _read(train, i)
        if within.is_over:
            break
    again = lambda: {i: _read(train, i) for i in plain}  # noqa: E731
    parts = set(range(len(next(iter(plain.values())))))
    now = stored.changed(list(wanted.values()), again)
    touched = [i for i in plain if _motion(plain[i], now[i], parts) > 0]
    if not touched or len(touched) > GLOBAL * len(plain):
        return
    is_moved = lambda i: _motion(plain[i], _read(train, i), parts) > 0  # noqa: E731
    held = []
    for index, element in wanted.items():
        mine = _read(val, index)
        others = [i for i in touched[:MOST_HOLDERS] if _motion(mine, plain[i], asked) > 0]
        if stored.changed([element], lambda others=others: any(map(is_moved, others))):
            held.append(index)
    if len(held) > len(wanted) / 2:
        text = (
            f"The target of {len(held)} of {len(wanted)} samples of val is made of numbers of "
            f"{_named(path)} that samples of train hold too: they overlap."
        )
        cure = "Split the stored series, pictures or histories first, and cut each part into samples."
        yield Finding("leakage", text, "val", {"array": path, "samples": held}, cure=cure)


def _overlap(one: Tensor, other: Array) -> bool:
    """Whether two arrays share memory."""
    both = one, torch.as_tensor(other)
    ends = [x.data_ptr() + x.element_size() * x.numel() for x in both]
    return max(x.data_ptr() for x in both) < min(ends)
