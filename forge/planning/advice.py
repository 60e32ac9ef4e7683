"""Advice: the strategy to use on given devices, and the reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from forge import registry
from forge.planning.strategies import SINGLE, Levers, StrategyRow

COMFORT = 0.8
"""Above this share of the memory a step barely fits: fragmentation, NCCL and the CUDA context are not counted."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended row, None if nothing fits, and the reason."""

    row: StrategyRow | None
    reason: str


def fit(peak: int, memory: int) -> str:
    """Return "yes", "barely" or "no"."""
    return "yes" if peak <= COMFORT * memory else "barely" if peak <= memory else "no"


def advise(rows: Sequence[StrategyRow], asked: Levers, memory: int, frugal: Collection[str] = ()) -> Advice:
    """Recommend the first row that fits with room to spare: strategies that divide less before those that divide more,
    then the levers that cost only compute (`frugal`), then all levers, then last resorts.

    `asked` are the levers of the recipe.
    """
    ladder = _ladder(rows, asked, frugal)
    passed: list[StrategyRow] = []
    for row in ladder:
        if fit(row.peak, memory) == "yes":
            return Advice(row, _why(row, passed, memory))
        passed.append(row)
    smallest = min(ladder, key=lambda row: row.peak)
    if fit(smallest.peak, memory) == "barely":
        return Advice(
            smallest, f"nothing leaves a fifth of the memory free; this needs least: {_share(smallest, memory)}"
        )
    smaller = "smaller micro-batches" + registry.advice("batch", " ({})", window=2)
    return Advice(
        None,
        f"nothing fits: the least is {label(smallest)}, {_share(smallest, memory)}. Use {smaller}, more devices, or a "
        "smaller model",
    )


def label(row: StrategyRow) -> str:
    return " + ".join((row.strategy, *row.levers))


def _ladder(rows: Sequence[StrategyRow], asked: Levers, frugal: Collection[str]) -> list[StrategyRow]:
    by_key = {(row.strategy, frozenset(row.levers)): row for row in rows}
    whole = {row.strategy: row.parameters + row.optimizer for row in rows if not row.is_last}
    kinds = sorted((kind for kind in whole if kind != SINGLE), key=lambda kind: -whole[kind]) or [SINGLE]
    every = {lever for row in rows for lever in row.levers}
    steps = [{*asked}, {*asked, *frugal}, every, {*asked, *every.difference(frugal)}]
    tried = [*((kind, frozenset(asked)) for kind in kinds[:-1]), *((kinds[-1], frozenset(step)) for step in steps)]
    return [by_key[key] for key in dict.fromkeys(tried) if key in by_key] + [
        row for row in rows if row.is_last and {*row.levers} >= {*asked}
    ]


def _why(row: StrategyRow, passed: Sequence[StrategyRow], memory: int) -> str:
    if not passed:
        return f"it fits with room to spare: {_share(row, memory)}"
    least = min(passed, key=lambda other: other.peak)
    fits = "fits only barely" if fit(least.peak, memory) == "barely" else "does not fit"
    return f"{label(least)} {fits} ({_share(least, memory)}); this does: {_share(row, memory)}"


def _share(row: StrategyRow, memory: int) -> str:
    return f"{row.peak / 2**30:.2f} of {memory / 2**30:.4g} GiB, {row.peak / memory:.0%}"
