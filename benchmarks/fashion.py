"""The FashionMNIST lab: `forge fit fashion_mlp` against a plain PyTorch script that does the same.

    FORGE_DATA=FOLDER python -m benchmarks.fashion                       # 3 seeds of 10 epochs: 8 minutes
    FORGE_DATA=FOLDER python -m benchmarks.fashion --epochs 1 --seeds 1  # a first look, half a minute
    python -m benchmarks.fashion --json > fashion.jsonl                  # the machine, then the rows

The script is [fashion_plain.py](fashion_plain.py): torchvision's data set with its transforms, a DataLoader with its
defaults, the classic loop, the test set after every epoch. [fashion_forge.py](fashion_forge.py) runs the unchanged
recipe: with progress, JSON lines, TensorBoard with pictures, guard and checkpoints. Each run is a process of its own
with the same number of threads; they take turns, seed by seed, each round starting with another.

"Run" is the time from a script's imports to its end: reading the data, training, evaluations. "Process" is that of the
whole process including imports, and "CPU" its user and system time, for shared machines. Ratios are medians over seeds
of a run's time over that of the plain script in the same round; "same Adam" compares with the plain script whose Adam
is also fused.

Bars: test accuracy at least 0.8832 (mean of 3 seeds); at most 1/4 of the script's time, at most 1/5 with fused Adam.
"""

from __future__ import annotations

import argparse
import gzip
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from rich.table import Table

from benchmarks import machine
from benchmarks.command_line import some_of
from forge_recipes.fashion_mnist import find_files

CONTENDERS = {
    "plain": ("plain", []),
    "forge": ("plain", []),
    "plain fused": ("plain fused", ["--fused"]),
    "forge fused": ("plain fused", ["--fused"]),
}
"""Name → the plain contender with the same Adam, and command-line options."""
FIRST = "plain"


@dataclass(frozen=True, slots=True)
class Timed:
    """Times and accuracy of one process."""

    run: float
    process: float
    cpu: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender over all seeds; accuracy is on the test set after the last epoch."""

    contender: str
    accuracy: float
    accuracies: list[float]
    run_s: float
    ratio: float
    ratio_same_adam: float
    process_s: float
    process_ratio: float
    cpu_s: float
    cpu_ratio: float
    epochs: int
    seeds: int
    threads: int


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = [FIRST, *(name for name in options.only if name != FIRST)]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(names, options.epochs, options.seeds, options.threads, Path(folder))
    machine.show(rows, table, options.json, width=120)
    return 0


def measure(names: list[str], epochs: int, seeds: int, threads: int, folder: Path) -> list[Row]:
    """Run every contender with every seed, in turn."""
    data = unpacked(find_files(None), folder / "data")
    timed: dict[str, list[Timed]] = {name: [] for name in names}
    for seed in range(seeds):
        for place in range(len(names)):
            name = names[(seed + place) % len(names)]
            timed[name].append(run(name, epochs, seed, threads, data, folder / f"{len(timed[name])} {name}"))
            print(f"{name}, seed {seed}: {timed[name][-1]}", file=sys.stderr)
    return [_row(name, timed, epochs, threads) for name in names]


def unpacked(raw: Path, root: Path) -> Path:
    """Make a folder for torchvision, which needs the files uncompressed."""
    for file in sorted(raw.glob("*-ubyte*")):
        target = root / "FashionMNIST" / "raw" / file.name.removesuffix(".gz")
        target.parent.mkdir(parents=True, exist_ok=True)
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return root


def run(name: str, epochs: int, seed: int, threads: int, data: Path, folder: Path) -> Timed:
    """Run a contender in a process of its own; return its times and test accuracy."""
    script = name.split()[0]
    words = [f"benchmarks.fashion_{script}", f"--data={data}", f"--epochs={epochs}", f"--seed={seed}"]
    words += CONTENDERS[name][1]
    if script == "forge":
        words.append(f"--run-dir={folder}")
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=environment)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    words = done.stdout.split()  # its last line: seconds S  test accuracy A
    return Timed(float(words[-4]), round(seconds, 2), round(cpu, 2), float(words[-1]))


def table(rows: list[Row]) -> Table:
    first = rows[0]
    shown = Table(title=f"{first.epochs} epochs, {first.seeds} seeds, {first.threads} threads")
    shown.add_column("", no_wrap=True)
    for heading in ("test accuracy", "run s", "of plain", "same Adam", "process s", "of plain", "CPU s", "of plain"):
        shown.add_column(heading, justify="right")
    for row in rows:
        ratios = f"{row.ratio:.3f}", f"{row.ratio_same_adam:.3f}"
        cpu = f"{row.cpu_s:.1f}", f"{row.cpu_ratio:.3f}"
        process = f"{row.process_s:.1f}", f"{row.process_ratio:.3f}"
        shown.add_row(row.contender, f"{row.accuracy:.4f}", f"{row.run_s:.1f}", *ratios, *process, *cpu)
    return shown


def _row(name: str, timed: dict[str, list[Timed]], epochs: int, threads: int) -> Row:
    own = timed[name]

    def ratio(what: str, to: str = FIRST) -> float:
        pairs = zip(own, timed.get(to, timed[FIRST]), strict=True)
        return round(median(getattr(a, what) / getattr(b, what) for a, b in pairs), 4)

    return Row(
        contender=name,
        accuracy=round(mean(run.accuracy for run in own), 4),
        accuracies=[run.accuracy for run in own],
        run_s=round(median(run.run for run in own), 2),
        ratio=ratio("run"),
        ratio_same_adam=ratio("run", CONTENDERS[name][0]),
        process_s=round(median(run.process for run in own), 2),
        process_ratio=ratio("process"),
        cpu_s=round(median(run.cpu for run in own), 2),
        cpu_ratio=ratio("cpu"),
        epochs=epochs,
        seeds=len(own),
        threads=threads,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fashion", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each run (default 10)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every process (default: all)")
    parser.add_argument("--only", type=some_of(CONTENDERS), default=list(CONTENDERS), help="contenders, besides plain")
    return parser


if __name__ == "__main__":
    sys.exit(main())
