"""Checkpoints: how long a save of 577 MiB stalls training, against `torch.save` to the same disk in the same run.

    python -m benchmarks.checkpoint                     # 7 rounds in the system's temporary folder
    python -m benchmarks.checkpoint --folder /data/tmp  # on another disk
    python -m benchmarks.checkpoint --device cuda       # state on the GPU, buffers pinned
    python -m benchmarks.checkpoint --rounds 3 --json   # one JSON object per line: the machine, then the rows

The state is a model of 50 million float32 parameters and Adam's two moments. Every round saves it in each way in turn,
over the file of the last round, as a run does with its last checkpoint; a `sync` in between is not timed. The figure is
the median over rounds, the ratio the median over rounds of the ratio to `torch.save` in the same round; "quiet" is the
ratio of the fastest fifth of the rounds, for shared machines. One unmeasured round comes first; forge's first save in
it allocates the buffers and has a row of its own. "published" is the time from the call until the checkpoint is hashed,
synced to the disk and renamed: `torch.save` and safetensors' `save_file` neither hash nor sync.

The last rows measure resuming: a loader that seeks to batch 1,000,000 of an epoch of 64,000,000 samples first computes
the order of the epoch, as every epoch does; "seeking" is the rest of the time until the first batch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import save_file
from torch.utils.data import Dataset

from benchmarks import machine
from forge.checkpoint import BackgroundWriter, StoredCheckpoint
from forge.data import Loader
from forge.data.order import Shuffled

BATCHES, BATCH_SIZE = 1_000_000, 64

STALL_BAR = 0.12
SEEK_BAR_S = 0.1

Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One timed operation."""

    name: str
    seconds: float
    ratio: float | None
    "Ratio to torch.save in the same round."
    ratio_quiet: float | None
    bar: str
    rounds: int


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rows = [
        *measure_saves(options.rounds, options.folder, options.layers, options.device),
        *measure_seek(options.rounds, options.batches),
    ]
    machine.show(rows, table, options.json)
    return 0


# -- saving -----------------------------------------------------------------------------------------------------------


def measure_saves(rounds: int, folder: Path | None, layers: int, device: str) -> list[Row]:
    """Measure every way to save, and reading back."""
    state = make_state(layers, device)
    flat = {f"{kind}.{name}": tensor for kind, tensors in state.items() for name, tensor in tensors.items()}
    writer = BackgroundWriter()
    times: Times = {}
    with _scratch(folder) as place:
        first = _timed(lambda: writer.submit(place / "first", state))
        writer.wait()
        _one_round({}, place, state, flat, writer)
        for _ in range(rounds):
            _one_round(times, place, state, flat, writer)
        writer.close()
    base = times["torch.save"]
    rows = [_row(name, own, base) for name, own in times.items()]
    ratio = round(first / median(base), 3)
    rows.insert(list(times).index("forge, stall"), Row("forge, first stall", round(first, 4), ratio, None, "", 1))
    return rows


def make_state(layers: int, device: str) -> dict[str, dict[str, torch.Tensor]]:
    """Make a model of `layers` layers of a million parameters, and Adam's moments; 48 layers are 577 MiB."""
    shapes = {f"layers.{i}.{kind}": shape for i in range(layers) for kind, shape in _LAYER.items()}
    generator = torch.Generator(device).manual_seed(0)
    return {
        kind: {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }


_LAYER = {"weight": (1024, 1024), "bias": (1024,)}


def _one_round(
    times: Times, place: Path, state: dict[str, Any], flat: dict[str, Any], writer: BackgroundWriter
) -> None:
    def note(name: str, action: Callable[[], Any]) -> float:
        times.setdefault(name, []).append(_timed(action))
        return times[name][-1]

    note("torch.save", lambda: torch.save(state, place / "state.pt"))
    os.sync()
    note("safetensors save_file", lambda: save_file(flat, place / "state.safetensors"))
    os.sync()
    target = place / "update-00000001"
    stall = note("forge, stall", lambda: writer.submit(target, state))
    times.setdefault("forge, published", []).append(stall + _timed(writer.wait))
    note("forge, verify", StoredCheckpoint(target).verify)
    note("forge, verify and load", StoredCheckpoint(target).load)


# -- seeking ----------------------------------------------------------------------------------------------------------


class Timed(Shuffled):
    """A shuffled order that records how long it took to compute."""

    seconds = 0.0

    def indices(self, seed: int, epoch: int) -> Any:
        began = perf_counter()
        made = super().indices(seed, epoch)
        self.seconds = perf_counter() - began
        return made


class Numbers(Dataset[int]):
    """Any number of samples without cost: each is its own index."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def measure_seek(rounds: int, batches: int) -> list[Row]:
    """Measure a loader that starts at the last of `batches`, each time in another epoch."""
    order = Timed(batches * BATCH_SIZE)
    loader = Loader(Numbers(order.samples), batch_size=BATCH_SIZE, sampler=order, seed=0)
    making: list[float] = []
    seeking: list[float] = []
    for epoch in range(rounds):
        total = _timed(lambda epoch=epoch: _first_batch(loader, epoch, (batches - 1) * BATCH_SIZE))
        making.append(order.seconds)
        seeking.append(total - order.seconds)
    return [
        Row(f"order of {order.samples:,} samples", round(median(making), 4), None, None, "", rounds),
        Row(f"seeking to batch {batches:,}", round(median(seeking), 4), None, None, f"≤ {SEEK_BAR_S} s", rounds),
    ]


def _first_batch(loader: Loader, epoch: int, samples: int) -> Any:
    loader.seek(epoch, samples)
    return next(iter(loader))


# -- output -----------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"checkpoints, {rows[0].rounds} rounds")
    shown.add_column("", no_wrap=True)
    for heading in ("seconds", "of torch.save", "quiet", "bar"):
        shown.add_column(heading, justify="right")
    for row in rows:
        ratios = ("" if ratio is None else f"{ratio:.3f}×" for ratio in (row.ratio, row.ratio_quiet))
        shown.add_row(row.name, f"{row.seconds:.3f}", *ratios, row.bar)
    return shown


def _row(name: str, own: list[float], base: list[float]) -> Row:
    least = max(1, len(own) // 5)
    return Row(
        name=name,
        seconds=round(median(own), 4),
        ratio=round(median(mine / theirs for mine, theirs in zip(own, base, strict=True)), 3),
        ratio_quiet=round(mean(sorted(own)[:least]) / mean(sorted(base)[:least]), 3),
        bar=f"≤ {STALL_BAR}×" if name == "forge, stall" else "",
        rounds=len(own),
    )


def _timed(action: Callable[[], Any]) -> float:
    began = perf_counter()
    action()
    return perf_counter() - began


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder, prefix="forge-checkpoint-") as name:
        yield Path(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind (default 7)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--device", default="cpu", help="device of the state (default cpu)")
    parser.add_argument("--layers", type=int, default=48, help="12 MiB of state each (default 48)")
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches of the epoch to seek in")
    return parser


if __name__ == "__main__":
    sys.exit(main())
