"""Loaders: the cost of a batch of 64 from 60,000 uint8 images of 28 × 28 in memory, with torch and forge.

    python -m benchmarks.loader                              # 15 rounds of whole epochs, about 2 minutes
    python -m benchmarks.loader --rounds 5 --json            # one JSON object per line: the machine, then the rows
    python -m benchmarks.loader --samples 640 --rounds 1     # smoke test, seconds

All contenders shuffle the same tensors and yield a whole epoch in turn, round after round, so that drift of the machine
affects them alike; the figure includes computing the epoch's order. Worker processes are started before. In the main
process the clock is CPU time (`time.process_time`), with workers wall time, because other processes do the work.

"ratio" is the median over rounds of a contender's cost over that of its baseline; "quiet" compares the fastest round of
each, for shared machines. "µs/sample over" is the difference to the baseline per sample.

Bars: TensorLoader at least 15 times cheaper per batch than DataLoader(TensorDataset) (ratio ≤ 0.067); Loader over a
pure dataset at most 1.05 times the DataLoader that it wraps; seeding at most 20 µs per sample.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import machine
from forge.data import Loader, TensorLoader

BATCH = 64


@dataclass(frozen=True, slots=True)
class Contender:
    """A loader, its baseline, and its clock."""

    name: str
    against: str
    make: Callable[[TensorDataset], Iterable[Any]]
    clock: Callable[[], float] = time.process_time


def _plain(data: TensorDataset, workers: int = 0) -> Iterable[Any]:
    return DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


CONTENDERS = [
    Contender("DataLoader", "DataLoader", _plain),
    Contender("Loader, pure", "DataLoader", lambda data: Loader(data, BATCH, True)),
    Contender("Loader, seeded", "Loader, pure", lambda data: Loader(data, BATCH, True, pure=False)),
    Contender("TensorLoader", "DataLoader", lambda data: TensorLoader(*data.tensors, batch_size=BATCH, shuffle=True)),
    Contender("DataLoader, 2 workers", "DataLoader, 2 workers", lambda data: _plain(data, 2), time.perf_counter),
    Contender(
        "Loader, pure, 2 workers", "DataLoader, 2 workers", lambda data: Loader(data, BATCH, True, 2), time.perf_counter
    ),
    Contender(
        "TensorLoader, by the wall",
        "DataLoader, 2 workers",
        lambda data: TensorLoader(*data.tensors, batch_size=BATCH, shuffle=True),
        time.perf_counter,
    ),
]


@dataclass(frozen=True, slots=True)
class Row:
    """One contender; times are microseconds per batch of 64, or per sample."""

    contender: str
    against: str
    clock: str
    us_per_batch: float
    ratio: float
    ratio_quiet: float
    us_per_sample_over: float
    us_per_sample_over_quiet: float
    batches: int
    rounds: int


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    rows = measure(options.samples, options.rounds)
    machine.show(rows, table, options.json, width=120)
    return 0


def measure(samples: int, rounds: int) -> list[Row]:
    """Measure every contender's epochs in turn, each round starting with another."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, 28, 28), dtype=torch.uint8, generator=generator)
    data = TensorDataset(images, torch.randint(0, 10, (samples,), generator=generator))
    loaders = {contender.name: contender.make(data) for contender in CONTENDERS}
    for loader in loaders.values():
        epoch(loader, time.perf_counter)
    costs: dict[str, list[float]] = {contender.name: [] for contender in CONTENDERS}
    for number in range(rounds):
        for place in range(len(CONTENDERS)):
            contender = CONTENDERS[(number + place) % len(CONTENDERS)]
            costs[contender.name].append(epoch(loaders[contender.name], contender.clock))
    return [_row(contender, costs, -(-samples // BATCH)) for contender in CONTENDERS]


def epoch(loader: Iterable[Any], clock: Callable[[], float]) -> float:
    """Return microseconds per batch of one whole epoch."""
    gc.collect()
    batches, start = 0, clock()
    for _ in loader:
        batches += 1
    return (clock() - start) / batches * 1e6


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"batches of {BATCH}, {rows[0].rounds} rounds of {rows[0].batches} batches")
    shown.add_column("", no_wrap=True)
    for heading in ("clock", "µs/batch", "against", "ratio", "quiet", "µs/sample over", "quiet"):
        shown.add_column(heading, justify="right")
    for row in rows:
        ratios = f"{row.ratio:.3f}×", f"{row.ratio_quiet:.3f}×"
        over = f"{row.us_per_sample_over:+.2f}", f"{row.us_per_sample_over_quiet:+.2f}"
        shown.add_row(row.contender, row.clock, f"{row.us_per_batch:,.1f}", row.against, *ratios, *over)
    return shown


def _row(contender: Contender, costs: dict[str, list[float]], batches: int) -> Row:
    own, base = costs[contender.name], costs[contender.against]
    pairs = list(zip(own, base, strict=True))
    return Row(
        contender=contender.name,
        against=contender.against,
        clock="CPU" if contender.clock is time.process_time else "wall",
        us_per_batch=round(median(own), 1),
        ratio=round(median(mine / theirs for mine, theirs in pairs), 4),
        ratio_quiet=round(min(own) / min(base), 4),
        us_per_sample_over=round(median(mine - theirs for mine, theirs in pairs) / BATCH, 3),
        us_per_sample_over_quiet=round((min(own) - min(base)) / BATCH, 3),
        batches=batches,
        rounds=len(own),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--samples", type=int, default=60_000, help="images in memory (default 60,000)")
    parser.add_argument("--rounds", type=int, default=15, help="epochs of each contender (default 15)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
