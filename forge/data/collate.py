"""pad_collate: collate samples with sequences of different lengths."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from forge.errors import DataError


class Padded(NamedTuple):
    """Sequences of different lengths as one tensor."""

    values: Tensor
    "(batch, longest, ...)."
    lengths: Tensor
    "(batch,): the length of each sequence."
    mask: Tensor
    "(batch, longest): True for data, False for padding."


def pad_collate(
    batch: list[Any],
    *,
    value: float | Mapping[str | int, float] = 0,
    side: Literal["right", "left"] = "right",
    multiple_of: int = 1,
    fields: Collection[str | int] | None = None,
) -> Any:
    """Collate samples whose sequences differ in length: each sequence becomes a `Padded(values, lengths, mask)`.

    ::

        Loader(texts, batch_size=32, collate_fn=pad_collate)
        Loader(texts, batch_size=32, collate_fn=functools.partial(pad_collate, value={"labels": -100}, multiple_of=8))

    A sequence is a tensor or an array with at least one dimension, of which the first is padded, or a list of numbers.
    Samples may be sequences, or nested tuples and dicts of them; everything else (numbers, strings, ...) is collated by
    torch's `default_collate`.

    `value` is the fill value; a dict gives one for each field of a sample by key or position, 0 for the others. `side`
    is the side to pad. `multiple_of` rounds the common length up. `fields` names the fields to pad, by key or position;
    the others are stacked. Without it, every sequence is padded.
    """
    if side not in ("right", "left"):
        raise DataError(f"pad_collate: side is {side!r}; it can be 'right' or 'left'.")
    if multiple_of < 1:
        raise DataError(f"pad_collate: multiple_of is {multiple_of}; it must be at least 1.")
    if not batch:
        raise DataError("pad_collate got an empty batch. Check the batch sampler.")
    return _collate(batch, (), _Rules(value, side, multiple_of, fields))


pad_collate.pure = True  # pyright: ignore[reportFunctionMemberAccess]  # draws no random numbers: needs no seeds


class _Rules(NamedTuple):
    value: float | Mapping[str | int, float]
    side: str
    multiple_of: int
    fields: Collection[str | int] | None

    def pads(self, path: tuple[str | int, ...]) -> bool:
        return self.fields is None or (len(path) > 0 and path[0] in self.fields)

    def fill(self, path: tuple[str | int, ...]) -> float:
        if isinstance(self.value, Mapping):
            return self.value.get(path[0], 0) if path else 0
        return self.value


def _collate(parts: list[Any], path: tuple[str | int, ...], rules: _Rules) -> Any:
    """Collate the parts at `path` of every sample."""
    if rules.pads(path) and all(map(_is_sequence, parts)):
        return _pad(_as_tensors(parts), path, rules)
    first = parts[0]
    if isinstance(first, Mapping):
        _check_alike(parts, path, [set(part) if isinstance(part, Mapping) else None for part in parts])
        return {key: _collate([part[key] for part in parts], (*path, key), rules) for key in first}
    if isinstance(first, (tuple, list)):
        _check_alike(parts, path, [len(part) if isinstance(part, (tuple, list)) else None for part in parts])
        columns = [_collate([part[i] for part in parts], (*path, i), rules) for i in range(len(first))]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    try:
        return default_collate(parts)
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(f"pad_collate: {_named(path)} cannot be collated: {error}") from error


def _is_sequence(part: Any) -> bool:
    """Whether a part is a sequence: lists of numbers are; tuples are records, even of numbers."""
    if isinstance(part, (Tensor, np.ndarray)):
        return part.ndim > 0
    return isinstance(part, list) and all(isinstance(item, (bool, int, float, np.number)) for item in part)


def _as_tensors(parts: list[Any]) -> list[Tensor]:
    """Convert to one dtype; an empty list, which has none, takes the others'."""
    tensors = [torch.as_tensor(part) for part in parts]
    typed = [tensor.dtype for tensor, part in zip(tensors, parts, strict=True) if not isinstance(part, list) or part]
    dtype = reduce(torch.promote_types, typed) if typed else torch.int64
    return [tensor.to(dtype) for tensor in tensors]


def _pad(tensors: list[Tensor], path: tuple[str | int, ...], rules: _Rules) -> Padded:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({shape[1:] for shape in shapes}) != 1:
        raise DataError(
            f"pad_collate: {_named(path)} has sequences that differ in more than their first dimension: "
            f"{', '.join(map(str, dict.fromkeys(shapes)))}. Only the first is padded; make the others equal."
        )
    fill = rules.fill(path)
    values = pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=rules.side)
    missing = -values.size(1) % rules.multiple_of
    if missing:
        ends = (missing, 0) if rules.side == "left" else (0, missing)
        values = F.pad(values, (0, 0) * (values.ndim - 2) + ends, value=fill)
    lengths = torch.tensor([shape[0] for shape in shapes])
    places = torch.arange(values.size(1))
    mask = places >= values.size(1) - lengths[:, None] if rules.side == "left" else places < lengths[:, None]
    return Padded(values, lengths, mask)


def _check_alike(parts: list[Any], path: tuple[str | int, ...], forms: list[Any]) -> None:
    for number, form in enumerate(forms):
        if form != forms[0]:
            raise DataError(
                f"pad_collate: {_named(path)} is not of one form: sample 0 of the batch has {_form(parts[0])}, sample "
                f"{number} has {_form(parts[number])}. Give every sample the same fields."
            )


def _form(part: Any) -> str:
    if isinstance(part, Mapping):
        return f"the keys {', '.join(map(repr, part))}"
    return f"{len(part)} fields" if isinstance(part, (tuple, list)) else f"a {type(part).__name__}"


def _named(path: tuple[str | int, ...]) -> str:
    return f"field {'.'.join(map(str, path))!r}" if path else "the sample itself"
