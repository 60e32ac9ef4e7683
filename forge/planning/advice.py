"""Advice: which strategy to take on so many devices of such a memory, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.planning.strategies import Levers, StrategyRow

COMFORT = 0.8
"""Above this share of the memory a step fits barely: fragments, NCCL's buffers and the CUDA context come on top."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to take, or None where nothing fits, and why."""

    row: StrategyRow | None
    reason: str


def fit(peak: int, memory: int) -> str:
    """ "yes", "barely" or "no"."""
    return "yes" if peak <= COMFORT * memory else "barely" if peak <= memory else "no"


def advise(rows: Sequence[StrategyRow], asked: Levers, memory: int) -> Advice:
    """The first rung that fits with room to spare: ddp, fsdp, remat, amp, offload, tensor parallel. `asked` are the
    levers that the recipe has already."""
    ladder = _ladder(rows, asked)
    passed: list[StrategyRow] = []
    for row in ladder:
        if fit(row.peak, memory) == "yes":
            return Advice(row, _why(row, passed, memory))
        passed.append(row)
    smallest = min(ladder, key=lambda row: row.peak)
    if fit(smallest.peak, memory) == "barely":
        return Advice(
            smallest, f"nothing leaves a fifth of the memory free; this takes least: {_told(smallest, memory)}"
        )
    return Advice(
        None,
        f"nothing fits: the least is {label(smallest)}, {_told(smallest, memory)}. Take smaller micro-batches "
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
        return f"it fits with room to spare: {_told(row, memory)}"
    least = min(passed, key=lambda other: other.peak)
    fits = "fits only barely" if fit(least.peak, memory) == "barely" else "does not fit"
    return f"{label(least)} {fits} ({_told(least, memory)}); this does: {_told(row, memory)}"


def _told(row: StrategyRow, memory: int) -> str:
    return f"{row.peak / 2**30:.2f} of {memory / 2**30:.4g} GiB, {row.peak / memory:.0%}"
