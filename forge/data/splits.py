"""Splits: the result of a data function, one loader per stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Loaders = Iterable[Any] | Mapping[str, Iterable[Any]] | None


@dataclass(slots=True)
class Splits:
    """The loaders of a data set. `val` and `test` may be dicts of loaders; a missing one is None."""

    train: Iterable[Any] | None = None
    val: Loaders = None
    test: Loaders = None
    predict: Loaders = None
