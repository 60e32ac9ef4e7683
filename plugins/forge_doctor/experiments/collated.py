"""Collated: put samples together as the loader does, and one by one: what belongs to a sample stays in one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_doctor.experiments.regroup import group_of
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, tensors

SAMPLES, FEWEST = 16, 4


class BatchPart(NamedTuple):
    """A part of a batch: what each sample has there when it is alone, and in which rows that is found."""

    own: list[Any]
    matches: Tensor
    "A row for each sample, and a column for each row of the batch."


def together(patient: Patient) -> Iterator[Finding]:
    """Find each sample in each part of a batch: a row that holds one in one part holds the same in all of them."""
    for split in patient.loaders:
        group = group_of(patient, split)
        if group is None or not group.is_collated or group.size < FEWEST:
            continue
        drawn = torch.Generator().manual_seed(SEED)
        chosen = torch.randperm(group.size, generator=drawn).tolist()[:SAMPLES]  # in no order
        apart = None
        with suppress(Exception):  # a function that takes no single samples
            whole, singles = group.take(chosen), [group.take([i]) for i in chosen]
            apart = None if _tells_the_order(whole, len(chosen)) else _apart(_owned(whole, singles, len(chosen)))
        if apart is not None:
            one, other, rows = apart
            text = (
                f"Where {len(chosen)} samples of {split} are put together, {rows} of them stand in one row of "
                f"{_called(one)} and in another of {_called(other)}: inputs and targets no longer belong together."
            )
            evidence = {"samples": len(chosen), "apart": rows, "parts": [one, other]}
            cure = "Sort, shuffle and filter all parts of a batch by one index, where the loader puts samples together."
            yield Finding("pairs_broken", text, split, evidence, cure=cure)
            return


def _called(path: str) -> str:
    return f"batch{path}" if path else "the batch"


def _owned(whole: Any, singles: list[Any], size: int, path: str = "") -> dict[str, BatchPart]:
    """Walk a batch beside the batches of single samples, and find the samples in the rows of its parts."""
    first = singles[0]
    if any(type(single) is not type(whole) for single in singles):
        return {}
    if isinstance(whole, Tensor):
        found = _rows(whole, singles, size)
        return {} if found is None else {path: _part(*found)}
    if isinstance(whole, (list, tuple)) and len(whole) == size and all(len(single) == 1 for single in singles):
        return {path: _part(list(whole), [single[0] for single in singles])}
    if isinstance(whole, Mapping):
        keys: Any = [key for key in whole if all(key in single for single in singles)]
    elif isinstance(whole, (list, tuple)) and len(whole) == len(first):
        keys = range(len(whole))
    elif hasattr(whole, "__dict__"):
        whole, singles = vars(whole), [vars(single) for single in singles]
        keys = [key for key in whole if all(key in single for single in singles)]
    else:
        return {}
    parts = (_owned(whole[k], [single[k] for single in singles], size, f"{path}[{k!r}]") for k in keys)
    return {name: part for found in parts for name, part in found.items()}


def _rows(whole: Tensor, singles: list[Tensor], size: int) -> tuple[list[Tensor], list[Tensor]] | None:
    """The rows of a tensor, and those that single samples have; None where it has no row for each of them."""
    for dim in range(min(2, whole.ndim)):
        if whole.shape[dim] == size and all(x.ndim == whole.ndim and x.shape[dim] == 1 for x in singles):
            return list(whole.unbind(dim)), [x.select(dim, 0) for x in singles]
    lengths = [len(x) if x.ndim else 0 for x in singles]
    if whole.ndim and len(whole) == sum(lengths) and len(set(lengths)) > 1 and 0 not in lengths:
        return list(whole.split(lengths)), singles  # joined end to end: only in the order in which they were given
    return None


def _part(rows: list[Any], own: list[Any]) -> BatchPart:
    return BatchPart(own, torch.tensor([[_holds(row, mine) for row in rows] for mine in own]))


def _holds(row: Any, own: Any) -> bool:
    """Whether a row is what a sample alone is, with padding at one end."""
    if not isinstance(row, Tensor) or not isinstance(own, Tensor):
        if isinstance(row, Mapping) and isinstance(own, Mapping):
            return row.keys() == own.keys() and all(_holds(row[k], own[k]) for k in row)
        if isinstance(row, (list, tuple)) and isinstance(own, (list, tuple)):
            return len(row) == len(own) and all(_holds(a, b) for a, b in zip(row, own, strict=True))
        return type(row) is type(own) and isinstance(row, (str, int, float)) and row == own
    if row.shape == own.shape:
        return torch.equal(row, own)
    if row.ndim != own.ndim or not own.numel() or any(a < b for a, b in zip(row.shape, own.shape, strict=True)):
        return False
    for ends in (False, True):
        inside = torch.zeros_like(row, dtype=torch.bool)
        corner = tuple(slice(a - b, a) if ends else slice(b) for a, b in zip(row.shape, own.shape, strict=True))
        inside[corner] = True
        padding = row[~inside]
        if torch.equal(row[corner], own) and bool((padding == padding[0]).all()):
            return True
    return False


def _tells_the_order(batch: Any, size: int) -> bool:
    """Whether a batch holds the numbers of its rows in another order, by which a step can put them back."""
    flat = [x.cpu() for x in tensors(batch) if x.shape == (size,) and not x.is_floating_point()]
    given = torch.arange(size)
    return any(torch.equal(x.sort().values, given) and not torch.equal(x, given) for x in flat)


def _apart(parts: dict[str, BatchPart]) -> tuple[str, str, int] | None:
    """Two parts of a batch that hold different samples in a row, and in how many rows; None where all agree.

    One of them tells the samples apart. The other holds in each row what some sample has, but not the sample of that
    row. It is not what another part holds at its place, as negatives and second labels of a mixture are.
    """
    for one, anchor in parts.items():
        if not all(bool((anchor.matches.sum(dim) == 1).all()) for dim in (0, 1)):
            continue
        rows = torch.arange(len(anchor.own)), anchor.matches.long().argmax(1)
        in_place = [part for part in parts.values() if bool(part.matches[rows].all())]
        for other, (own, matches) in parts.items():
            wrong = ~matches[rows]
            is_given_twice = any(all(map(_holds, part.own, own)) for part in in_place)
            if bool(wrong.any()) and bool(matches.any(0).all()) and not is_given_twice:
                return one, other, int(wrong.sum())
    return None
