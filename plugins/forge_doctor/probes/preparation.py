"""Probes of how numbers are prepared: values that were filled in, and ids that share a row of an embedding."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.data import stacked
from forge_doctor.probes.reference import table
from forge_doctor.watch import where

LIMITED = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "acos", "asin", "acosh", "atanh", "pow", "__pow__"}
"""Functions that are defined for some numbers alone."""
OF_NUMPY = re.compile(r"invalid value encountered in (log\w*|sqrt|power|arc\w+)")
MOST_VALUES = 20_000_000
IDS_PER_ROW = 8
CYCLES = {7, 12, 24, 30, 31, 52, 60, 365, 366}
"""Numbers that time is taken modulo of."""


class DomainWatch(TorchFunctionMode):
    """Notes functions that make NaNs out of numbers, with the share of them, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, float, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = args[0] if args and isinstance(args[0], Tensor) else None
        is_looked_at = name.rstrip("_") in {n.rstrip("_") for n in LIMITED} and given is not None
        was_number = given.isfinite() if is_looked_at and given is not None and given.numel() < MOST_VALUES else None
        result = func(*args, **(kwargs or {}))
        if was_number is not None and isinstance(result, Tensor) and result.shape == was_number.shape:
            share = float((result.isnan() & was_number).float().mean()) if result.numel() else 0.0
            if share > 0.05:
                self.made.append((name.strip("_"), share, where()))
        return result


def filled(patient: Patient) -> Iterator[Finding]:
    """Prepare the data again: a logarithm of negative numbers whose NaNs were filled with one value."""
    if patient.rebuild is None:
        return
    with DomainWatch() as watch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patient.rebuild()
    made = watch.made
    if not made:
        named = [match for item in caught if (match := OF_NUMPY.match(str(item.message)))]
        made = [(match.group(1), 0.3, "") for match in named]
    for name, share, line in made:
        columns = _columns_with_one_value(patient, 0.6 * share)
        if columns:
            value, count, often = columns
            yield Finding(
                "filled_values",
                f"{name} makes NaNs while the data are prepared, and they are filled: {count} columns of the inputs "
                f"are {value:g} in up to {often:.0%} of the rows.",
                line or "train",
                {"function": name, "value": value, "columns": count, "share": often},
            )
            return


def _columns_with_one_value(patient: Patient, share: float) -> tuple[float, int, float] | None:
    """The value that fills this share of a column inside its range, the number of such columns, and its largest share.

    A value at the end of the range may be what was measured: no rain.
    """
    for x in stacked(patient, patient.samples).values():
        if not x.is_floating_point() or x.ndim < 2 or len(x) < 30 or not bool(x.isfinite().all()):
            continue
        columns = x.flatten(1)[:, :2000].float()
        usual = columns.mode(0).values
        often = (columns == usual).float().mean(0)
        inside = (usual > columns.min(0).values) & (usual < columns.max(0).values)
        is_filled = (often >= max(share, 0.05)) & (often < 0.95) & inside
        is_filled &= torch.tensor([len(column.unique()) >= 20 for column in columns.T])
        if bool(is_filled.any()):
            most = int((often * is_filled).argmax())
            return float(usual[most]), int(is_filled.sum()), float(often[most])
    return None


def ids(patient: Patient) -> Iterator[Finding]:
    """Ids that are taken modulo the rows of an embedding, though their targets differ."""
    rows = table(patient, patient.samples)
    lookups = _lookups(patient)
    if rows is None or not lookups:
        return
    columns = stacked(patient, patient.samples[: len(rows)])
    for place, column in columns.items():
        if column.is_floating_point() or column.ndim > 1 or column.is_complex():
            continue
        for path, count in _moduli(patient, lookups, place):
            distinct = len(column.unique())
            explained = _explained(column.long(), column.long() % count, rows.y)
            if distinct >= IDS_PER_ROW * count and explained > 0.25 and not _is_time(column.long(), rows.y):
                yield Finding(
                    "ids_collide",
                    f"{path} is looked up by ids modulo {count}: {distinct} different ids share {count} rows, though "
                    f"which id it is explains {explained:.0%} of the targets beyond its row.",
                    path,
                    {"ids": distinct, "rows": count, "explained": explained},
                )
                return


def _lookups(patient: Patient) -> list[tuple[str, int, Tensor]]:
    """The embeddings that a step looks up: path, rows and the numbers of the rows."""
    found: list[tuple[str, int, Tensor]] = []
    task = patient.clone()

    def note(path: str, rows: int) -> Any:
        return lambda module, args: found.append((path, rows, args[0].detach().flatten().cpu()))

    for path, module in task.named_modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(note(path, module.num_embeddings))
    patient.run(task, patient.batches[0])
    return found


def _moduli(patient: Patient, lookups: list[tuple[str, int, Tensor]], place: int) -> list[tuple[str, int]]:
    """The embedding that a column of ids modulo its rows is looked up in; nothing if the ids are looked up twice."""
    given = tensors(patient.batches[0])
    column = given[place].detach().flatten().cpu() if place < len(given) else torch.zeros(0)
    if column.is_floating_point() or not len(column) or len(column.unique()) < IDS_PER_ROW:
        return []
    found = [
        (path, rows)
        for path, rows, used in lookups
        if rows not in CYCLES
        and len(used) == len(column)
        and bool((used == column % rows).all())
        and not bool((used == column).all())
    ]
    others = [used for path, _, used in lookups if path not in {name for name, _ in found} and len(used) == len(column)]
    return found if len(found) == 1 and not any(_follows(column, used) for used in others) else []


def _follows(column: Tensor, used: Tensor) -> bool:
    """Whether the rows that are used are a function of the ids, as id // n is beside id % n."""
    pairs = torch.stack([column, used], 1).unique(dim=0)
    return len(pairs) == len(column.unique()) and len(column.unique()) < len(column)


def _explained(column: Tensor, group: Tensor, y: Tensor) -> float:
    """The share of the variance of targets inside groups that the ids explain, less what chance explains."""
    total = (y - _means(group, y)).pow(2).sum()
    rest = (y - _means(column, y)).pow(2).sum()
    ids, groups = len(column.unique()), len(group.unique())
    if len(y) - ids < 50 or float(total) <= 0:
        return 0.0
    return 1 - float(rest / (len(y) - ids)) / float(total / (len(y) - groups))


def _is_time(column: Tensor, y: Tensor) -> bool:
    """Whether neighbouring ids have similar targets, as days have."""
    order = column.unique(return_inverse=True)[1]
    means = torch.zeros(int(order.max()) + 1, y.shape[1]).index_copy_(0, order, _means(column, y))
    means = means - means.mean(0)
    return float((means[1:] * means[:-1]).sum() / means.pow(2).sum().clamp_min(1e-12)) > 0.25


def _means(keys: Tensor, y: Tensor) -> Tensor:
    """The mean target of the samples with the same key, for each sample."""
    _, place = keys.unique(return_inverse=True)
    count = torch.zeros(int(place.max()) + 1, 1).index_add_(0, place, torch.ones(len(y), 1))
    return (torch.zeros(len(count), y.shape[1]).index_add_(0, place, y) / count)[place]
