"""A look at batches: every tensor in them with its shape, type, range, share of NaN and counts of labels.

::

    from forge_doctor.batch_look import look_at

    for leaf in look_at([next(iter(train))]):
        print(leaf.name, leaf.shape, leaf.dtype, leaf.lowest, leaf.highest)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_LABELS = 200
"""Integers with more different values are no labels."""
DEPTH = 8
"""Levels of containers that are searched."""
KEPT = 64
"""Texts that are kept of a leaf, to be shown."""


@dataclass(slots=True)
class Leaf:
    """One tensor, list of texts or other value of a batch; of several batches, all of them together."""

    name: str
    kind: str
    "tensor, text, number, or the class of anything else."
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtype: str = ""
    device: str = ""
    entries: int = 0
    nan: int = 0
    infinite: int = 0
    lowest: float | None = None
    highest: float | None = None
    total: float = 0.0
    "The sum of all finite entries."
    labels: Counter[int] = field(default_factory=Counter)
    "Counts by value, or of the ones by column if `by_column`; empty if the values are no labels."
    by_column: bool = False
    mask: bool = False
    "Whether it is zeros and ones for the entries of another leaf."
    first: Any = None
    "The value in the first batch."
    texts: list[str] = field(default_factory=list)

    @property
    def shape(self) -> str:
        """The shape, with ranges where batches differ."""
        if len({len(shape) for shape in self.shapes}) != 1:
            return ", ".join(dict.fromkeys(" × ".join(map(str, shape)) or "scalar" for shape in self.shapes))
        sizes = [sorted(set(axis)) for axis in zip(*self.shapes, strict=True)]
        return " × ".join(str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in sizes) or "scalar"

    @property
    def mean(self) -> float | None:
        """The mean of the finite entries."""
        finite = self.entries - self.nan - self.infinite
        return self.total / finite if finite and self.lowest is not None else None

    def as_data(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        share = self.nan / self.entries if self.entries else 0.0
        facts = {
            "name": self.name,
            "kind": self.kind,
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": self.dtype,
            "device": self.device,
            "min": self.lowest,
            "max": self.highest,
            "mean": self.mean,
            "nan_share": share,
            "infinite": self.infinite,
            "labels": {str(value): count for value, count in sorted(self.labels.items())},
            "labels_by_column": self.by_column,
        }
        return facts | ({"texts": self.texts} if self.texts else {})


def look_at(batches: Iterable[Any]) -> list[Leaf]:
    """Return the leaves of batches: dicts, tuples, dataclasses and objects are searched, by name."""
    found: dict[str, Leaf] = {}
    for batch in batches:
        for name, value in leaves(batch):
            _add(found, name, value)
    for leaf in found.values():
        if len(leaf.labels) > (MOST_LABELS if leaf.dtype != "bool" else 2) and not leaf.by_column:
            leaf.labels.clear()
    _forget_masks(found)
    return list(found.values())


def _forget_masks(found: dict[str, Leaf]) -> None:
    """A matrix of zeros and ones beside another of its shape, or called a mask, holds no labels."""
    for leaf in found.values():
        twin = any(other is not leaf and other.shapes == leaf.shapes for other in found.values())
        if leaf.by_column and (twin or "mask" in leaf.name.lower()):
            leaf.by_column, leaf.mask = False, True
            leaf.labels.clear()


def leaves(value: Any, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the values in a batch with their names, as `batch[0]`, `images` or `target.boxes`."""
    inner = _children(value) if depth else None
    if inner is None:
        yield name or "batch", value
        return
    for key, child in inner:
        joined = key if not name else f"{name}{key}" if key.startswith("[") else f"{name}.{key}"
        yield from leaves(child, joined, depth - 1)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a container holds, by key; None for a leaf."""
    if isinstance(value, (Tensor, np.ndarray, np.generic, str, bytes, Number, type(None))):
        return None
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):
        held_keys: Any = value.keys
        keys: Any = held_keys() if callable(held_keys) else held_keys
        return [(str(key), value[key]) for key in keys]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: Any = getattr(value, "_fields")  # noqa: B009
        return list(zip(fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, (str, bytes, Number)) for item in value):
            return None  # texts or numbers: one leaf
        return [(f"[{place}]", item) for place, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    held = getattr(value, "__dict__", None)
    if held and any(isinstance(item, (Tensor, np.ndarray)) for item in held.values()):
        return [(key, item) for key, item in held.items() if not key.startswith("_")]
    return None


def _add(found: dict[str, Leaf], name: str, value: Any) -> None:
    tensor = as_tensor(value)
    if tensor is not None:
        leaf = found.setdefault(name, Leaf(name, "tensor", first=tensor))
        leaf.shapes.append(tuple(tensor.shape))
        leaf.dtype, leaf.device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        _add_numbers(leaf, tensor)
        return
    texts = [value] if isinstance(value, (str, bytes)) else value
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(text, (str, bytes)) for text in texts):
        leaf = found.setdefault(name, Leaf(name, "text", first=value))
        leaf.shapes.append((len(texts),))
        room = KEPT - len(leaf.texts)
        leaf.texts += [t.decode(errors="replace") if isinstance(t, bytes) else t for t in texts[:room]]
        return
    leaf = found.setdefault(name, Leaf(name, type(value).__name__, first=value))
    leaf.shapes.append((len(value),) if hasattr(value, "__len__") else ())


def as_tensor(value: Any) -> Tensor | None:
    """Return the numbers of a value as a tensor on the host, or None if it holds none."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.layout is not torch.strided:
            value = value.to_dense() if not value.is_nested else value.to_padded_tensor(0.0)
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (bool, int, float)) for item in value):
        return torch.tensor(value)
    return None


def _add_numbers(leaf: Leaf, tensor: Tensor) -> None:
    leaf.entries += tensor.numel()
    if not tensor.numel():
        return
    if tensor.is_complex():
        tensor = tensor.abs()
    numbers = tensor.double()
    finite = numbers.isfinite()
    leaf.nan += int(numbers.isnan().sum())
    leaf.infinite += int(numbers.isinf().sum())
    numbers = numbers[finite]
    if numbers.numel():
        low, high = numbers.min().item(), numbers.max().item()
        leaf.lowest = low if leaf.lowest is None else min(leaf.lowest, low)
        leaf.highest = high if leaf.highest is None else max(leaf.highest, high)
        leaf.total += numbers.sum().item()
    _add_labels(leaf, tensor)


def _add_labels(leaf: Leaf, tensor: Tensor) -> None:
    """Count integers per sample; of a matrix of zeros and ones, the ones per column."""
    whole = not tensor.is_floating_point()
    if whole and tensor.ndim <= 1:
        leaf.labels.update(tensor.long().reshape(-1).tolist())
    elif tensor.ndim == 2 and tensor.size(1) <= MOST_LABELS and bool(((tensor == 0) | (tensor == 1)).all()):
        leaf.by_column = True
        leaf.labels.update({column: int(count) for column, count in enumerate(tensor.sum(0).tolist())})


# -- pictures and tokens ----------------------------------------------------------------------------------------------


def pictures(found: Iterable[Leaf]) -> Leaf | None:
    """Return the leaf that looks like pictures: (N, 1 or 3, H, W), (N, H, W, 3), or (N, H, H)."""
    return next((leaf for leaf in found if leaf.kind == "tensor" and as_pictures(leaf.first) is not None), None)


def as_pictures(tensor: Tensor) -> Tensor | None:
    """Return a tensor as pictures (N, C, H, W) with values from 0 to 1, or None if it does not look like pictures."""
    if tensor.is_complex() or not tensor.numel():
        return None
    if tensor.ndim == 4 and tensor.size(1) not in (1, 3) and tensor.size(3) in (1, 3):
        tensor = tensor.permute(0, 3, 1, 2)
    elif tensor.ndim == 3 and tensor.size(1) == tensor.size(2) and tensor.is_floating_point():
        tensor = tensor.unsqueeze(1)
    if tensor.ndim != 4 or tensor.size(1) not in (1, 3) or min(tensor.shape[2:]) < 4:
        return None
    if tensor.dtype == torch.uint8:
        return tensor.float() / 255
    numbers = tensor.float().nan_to_num(0.0, 0.0, 0.0)
    low, high = numbers.min(), numbers.max()
    return numbers.clamp(0, 1) if low >= 0 and high <= 1 else (numbers - low) / (high - low).clamp(min=1e-12)


def token_leaves(found: Iterable[Leaf]) -> list[Leaf]:
    """Return the leaves that look like rows of tokens: whole numbers, (N, T)."""
    return [
        leaf
        for leaf in found
        if leaf.kind == "tensor"
        and leaf.first.ndim == 2
        and not (leaf.by_column or leaf.mask)
        and leaf.dtype in ("int64", "int32", "int16", "uint16", "uint8")
    ]


def captions(found: Iterable[Leaf], count: int, classes: Iterable[str] | None = None) -> list[str]:
    """Return the labels of the first samples, by class name if there are names; empty without labels."""
    names = list(classes or ())
    for leaf in found:
        if leaf.labels and not leaf.by_column and leaf.kind == "tensor" and leaf.first.ndim == 1:
            values = leaf.first[:count].tolist()
            named = bool(names) and all(0 <= value < len(names) for value in values)
            return [str(names[int(value)]) if named else f"{value:g}" for value in values]
    return []
