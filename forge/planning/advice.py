"""Advice: the strategy to use on given devices, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.planning.strategies import Levers, StrategyRow

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


def advise(rows: Sequence[StrategyRow], asked: Levers, memory: int) -> Advice:
    """Recommend the first row that fits with room to spare, in this order: ddp, fsdp, remat, amp, offload, tensor
    parallel. `asked` are the levers of the recipe."""
    ladder = _ladder(rows, asked)
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
    return Advice(
        None,
        f"nothing fits: the least is {label(smallest)}, {_share(smallest, memory)}. Use smaller micro-batches "
        "(a smaller batch with -p accumulate), more devices, or a smaller model",
    )


def label(row: StrategyRow) -> str:
    levers = str(row.levers)
    return f"{row.strategy} + {levers}" if levers else row.strategy


def _ladder(rows: Sequence[StrategyRow], asked: Levers) -> list[StrategyRow]:
    many = any(row.strategy == "ddp" for row in rows)
    steps = [asked, asked._replace(remat=True), Levers(amp=True, remat=True), asked._replace(amp=True)]
    plain = [("ddp", asked), *(("fsdp", step) for step in steps)] if many else [("single", step) for step in steps]
    by_key = {(row.strategy, row.levers): row for row in rows}
    first = [by_key[key] for key in dict.fromkeys(plain) if key in by_key]
    others = [row for row in rows if row.strategy.startswith("fsdp + ") and row.levers.amp >= asked.amp]
    return first + others


def _why(row: StrategyRow, passed: Sequence[StrategyRow], memory: int) -> str:
    if not passed:
        return f"it fits with room to spare: {_share(row, memory)}"
    least = min(passed, key=lambda other: other.peak)
    fits = "fits only barely" if fit(least.peak, memory) == "barely" else "does not fit"
    return f"{label(least)} {fits} ({_share(least, memory)}); this does: {_share(row, memory)}"


def _share(row: StrategyRow, memory: int) -> str:
    return f"{row.peak / 2**30:.2f} of {memory / 2**30:.4g} GiB, {row.peak / memory:.0%}"
