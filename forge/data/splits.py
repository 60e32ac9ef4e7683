"""Splits: the result of a data function, one loader per stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forge.data.protocols import is_live

Loaders = Iterable[Any] | Mapping[str, Iterable[Any]] | None


@dataclass(slots=True)
class Splits:
    """The loaders of a data set. `val` and `test` may be dicts of loaders; a missing one is None."""

    train: Iterable[Any] | None = None
    val: Loaders = None
    test: Loaders = None
    predict: Loaders = None

    def live_loaders(self) -> list[Any]:
        """Return the loaders that make their batches with the task."""
        return [loader for given in (self.train, self.val, self.test, self.predict) for loader in live_loaders(given)]


def by_stage(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return loaders by stage: where a stage got Splits, the loaders of these, for every stage that got none."""
    whole = next((each for each in given.values() if isinstance(each, Splits)), None)
    if whole is None:
        return dict(given)
    return {
        stage: getattr(whole, stage) if each is None or isinstance(each, Splits) else each
        for stage, each in given.items()
    }


def live_loaders(given: Any) -> list[Any]:
    """Return the loaders of a stage that make their batches with the task (`forge.data.live`)."""
    loaders = given.values() if isinstance(given, dict) else [given]
    return [loader for loader in loaders if is_live(loader)]
