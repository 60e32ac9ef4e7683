"""Linear layers in float8 against bfloat16: time, memory and loss curves of a GPT on a GPU.

    python -m benchmarks.fp8                     # milliseconds and GB of a GPT of width 2048; about a minute
    python -m benchmarks.fp8 --width 768 --batch 64 --rows bf16,all,auto,head
    python -m benchmarks.fp8 --curves            # losses over 1,000 updates on real text, two seeds; about a minute
    python -m benchmarks.fp8 --json > fp8.jsonl  # one JSON object per line: the machine, then the rows
    python -m benchmarks.fp8 --tiny [--curves]   # smoke test on any machine, where nothing runs in float8

Every row is a `forge.Trainer.fit` in its own process, with `amp` in bf16, `compile` and `clip`. Processes compile at
the same time and then take turns, a block of updates each, so that a drift of the device meets all of them; the figure
is the median block, the spread half the distance between the extremes. Peak memory is what torch allocated in that
process. The head is an nn.Linear that shares the embedding's weight.

The curves are those of a small GPT over bytes, compiled by block, with all layers and the head in float8. Its text is
tiny Shakespeare if that is in $FORGE_DATA or the user's cache, else Python's standard library. The difference between
two seeds in bfloat16 is the noise that the difference between bfloat16 and float8 is held against.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from benchmarks import machine
from benchmarks.command_line import some_of
from forge.data import TokenStream
from forge_recipes.gpt import GPT
from forge_recipes.roots import data_root

ROWS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "all": {"fp8": {"layers": "all"}},
    "auto": {"fp8": {}},
    "mlp": {"fp8": {"layers": "*.mlp.*"}},
    "head": {"fp8": {"layers": "head"}},
}
"""Row → the plugins that it adds."""
WARM_UP, BLOCKS, BLOCK = 8, 5, 8
"""Updates before the clock, blocks, and updates in each."""
LOG_EVERY = 50
MOST_TEXT = 5_000_000
"""Bytes that are read, and kept of the standard library."""
READY = "ready"
MARK = "@"
"""Begins every line from a row's process to this one; others may print to its stdout too."""


@dataclass(frozen=True, slots=True)
class Case:
    layers: int = 12
    width: int = 2048
    context: int = 1024
    batch: int = 16
    vocabulary: int = 50257
    updates: int = 0
    lr: float = 3e-4

    @classmethod
    def of(cls, options: argparse.Namespace) -> Case:
        if options.tiny:
            return cls(2, 32, 16, 4, 256, updates=100)
        if options.curves:
            return cls(6, 512, 256, 32, 256, updates=1000, lr=1e-3)
        return cls(options.layers, options.width, batch=options.batch)


class HeadedGPT(GPT):
    """The recipe's GPT with its head as a layer, which shares the weight of the embedding."""

    def __init__(self, case: Case):
        super().__init__(case.layers, case.width, max(2, case.width // 64), case.context, case.vocabulary, lr=case.lr)
        self.head = nn.Linear(case.width, self.tokens.num_embeddings, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.head(self(inputs)).flatten(0, 1), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.training_step(batch)}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def stack(row: str, **compiler: Any) -> dict[str, dict[str, Any]]:
    if not torch.cuda.is_available():
        compiler["backend"] = "aot_eager"
    return {"amp": {"dtype": "bf16"}, "compile": compiler, "clip": {"max_norm": 1.0}, **ROWS[row]}


# ---------------------------------------------------------------------------------------------------------------------
# Speed: one process per row, in turns


class Turns:
    """A loader that waits for its turn before each block of updates, and reports the seconds of one."""

    def __init__(self, case: Case, ask: IO[str], to: IO[str]):
        make = torch.Generator().manual_seed(1)
        text = torch.randint(case.vocabulary, (4, case.batch, case.context + 1), generator=make)
        text = text.pin_memory() if torch.cuda.is_available() else text
        self.kept = [(part[:, :-1], part[:, 1:]) for part in text]
        self.ask, self.to = ask, to

    def __len__(self) -> int:
        return WARM_UP + BLOCKS * BLOCK + 1

    def __iter__(self) -> Iterator[Any]:
        began: float | None = None
        for index in range(len(self)):
            if index >= WARM_UP and (index - WARM_UP) % BLOCK == 0:
                began = self._turn(began)
            yield self.kept[index % len(self.kept)]

    def _turn(self, began: float | None) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        tell(READY if began is None else time.perf_counter() - began, self.to)
        self.ask.readline()
        return time.perf_counter()


def train_in_turns(case: Case, row: str) -> None:
    """Be the process of one row."""
    to = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        torch.manual_seed(0)
        trainer = forge.Trainer(
            max_epochs=1,
            seed=0,
            device=device(),
            run_dir=False,
            allow_inexact=True,  # this loader cannot be resumed
            log_every=10 * len(Turns(case, sys.stdin, to)),
            plugins=stack(row),
        )
        trainer.fit(HeadedGPT(case), Turns(case, sys.stdin, to))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    tell(json.dumps({"peak_gb": peak}), to)


def tell(what: object, to: IO[str]) -> None:
    print(f"{MARK}{what}", file=to, flush=True)


@dataclass(frozen=True, slots=True)
class Speed:
    row: str
    ms_per_update: float | None = None
    ms_spread: float | None = None
    speed: float | None = None
    "How many times as fast as bf16."
    tokens_per_s: float | None = None
    peak_gb: float | None = None
    note: str = ""


class RowProcess:
    """A row in its own process, seen from outside."""

    def __init__(self, row: str, arguments: list[str]):
        self.row, self.seconds = row, list[float]()
        command = [sys.executable, "-m", "benchmarks.fp8", "--one", row, *arguments]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def hear(self) -> str:
        """Return the next line; empty where the process has ended."""
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):
            if line.startswith(MARK):
                return line.removeprefix(MARK).strip()
        return ""

    def go(self) -> str:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self.hear()

    def end(self, well: bool) -> str:
        """Return nothing, or where it did not end well the last line of its errors, and print more of them."""
        if well:
            self.process.wait(60)
        elif self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["no message"]
        self.errors.close()
        if well:
            return ""
        print(f"{self.row}:", *lines[-40:], sep="\n", file=sys.stderr)
        return lines[-1][:300]


def measure(case: Case, rows: list[str], arguments: list[str]) -> list[Speed]:
    """Measure all rows, in turns."""
    running = [RowProcess(row, arguments) for row in rows]
    found: dict[str, Speed] = {}
    ready = [process for process in running if process.hear() == READY]
    peaks: dict[str, float | None] = {}
    for _ in range(BLOCKS):
        for process in ready:
            with contextlib.suppress(ValueError):  # it has failed: its error is read below
                process.seconds.append(float(process.go()))
    for process in ready:
        with contextlib.suppress(ValueError):
            peaks[process.row] = json.loads(process.go())["peak_gb"]
    base = next((statistics.median(p.seconds) / BLOCK for p in running if p.row == "bf16" and p.seconds), None)
    for process in running:
        message = process.end(process.row in peaks)
        times = sorted(process.seconds)
        if message:
            found[process.row] = Speed(process.row, note=message)
            continue
        middle, peak = statistics.median(times) / BLOCK, peaks[process.row]
        found[process.row] = Speed(
            process.row,
            round(1e3 * middle, 3),
            round(1e3 * (times[-1] - times[0]) / 2 / BLOCK, 3),
            None if base is None else round(base / middle, 4),
            round(case.batch * case.context / middle),
            None if peak is None else round(peak, 2),
        )
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# Curves


@dataclass(frozen=True, slots=True)
class Curve:
    row: str
    seed: int
    updates: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    "The mean loss of each interval."
    val_loss: float | None = None
    note: str = ""

    @property
    def last(self) -> float:
        """The mean loss of the last fifth."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 5) :]) if self.losses else math.nan


def text() -> tuple[str, bytes]:
    """Return the name of a text, and its bytes."""
    path = data_root(None, "tinyshakespeare") / "input.txt"
    if path.is_file():
        return "tiny Shakespeare", path.read_bytes()[:MOST_TEXT]
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "Python's standard library", b"\n".join(file.read_bytes() for file in library)[:MOST_TEXT]


def train_for_a_curve(case: Case, row: str, seed: int) -> Curve:
    tokens = np.frombuffer(text()[1], np.uint8).astype(np.uint16)
    cut = int(0.95 * len(tokens))
    samples = case.updates * case.batch
    train = TokenStream(tokens[:cut], case.context, case.batch, samples=samples)
    val = TokenStream(tokens[cut : cut + 64 * case.context + 1], case.context, 16, mode="sequential")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        trainer = forge.Trainer(
            max_epochs=1,
            seed=seed,
            device=device(),
            run_dir=Path(folder) / "run",
            log_every=LOG_EVERY,
            plugins={**stack(row, blocks="Block"), "schedule": {"warmup": case.updates // 10}, "jsonl": {}},
        )
        result = trainer.fit(HeadedGPT(case), train, val)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["update"], line["train/loss"]) for line in lines if "train/loss" in line]
    return Curve(row, seed, [u for u, _ in logged], [loss for _, loss in logged], result.metrics["val/loss"])


def curves(rows: list[str], seeds: list[int], arguments: list[str]) -> list[Curve]:
    """Train every row with every seed, all at the same time."""
    options = ["--curves", *arguments]
    running = [(seed, RowProcess(row, ["--seed", str(seed), *options])) for seed in seeds for row in rows]
    found: list[Curve] = []
    for seed, process in running:
        line = process.hear()
        message = process.end(bool(line))
        found.append(Curve(**json.loads(line)) if line else Curve(process.row, seed, note=message))
    return found


def verdict(found: list[Curve]) -> str:
    """Compare the last losses: rows of one seed with each other, and seeds of bf16 with each other."""
    last = {(curve.row, curve.seed): curve.last for curve in found}
    base = [value for (row, _), value in last.items() if row == "bf16"]
    noise = max(base) - min(base) if base else math.nan
    parts = [
        f"{row}, seed {seed}: {value - last['bf16', seed]:+.4f}"
        for (row, seed), value in last.items()
        if row != "bf16" and ("bf16", seed) in last
    ]
    return f"loss over the last fifth, minus bf16's: {'; '.join(parts)}. Between bf16's own seeds: {noise:.4f}."


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    case = Case.of(options)
    if options.one:
        if not options.curves:
            train_in_turns(case, options.one)
            return 0
        with contextlib.redirect_stdout(sys.stderr):
            curve = train_for_a_curve(case, options.one, options.seed)
        tell(json.dumps(asdict(curve)), sys.stdout)
        return 0
    if not torch.cuda.is_available() and not options.tiny:
        print("No CUDA device is available. For a smoke test: python -m benchmarks.fp8 --tiny", file=sys.stderr)
        return 2
    sizes = ["--width", str(options.width), "--layers", str(options.layers), "--batch", str(options.batch)]
    passed = [*sizes, *(["--tiny"] if options.tiny else [])]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found = curves(options.rows, [0, 1], passed) if options.curves else measure(case, options.rows, passed)
    if options.json:
        print(json.dumps({"machine": {"gpu": gpu, **machine.describe()}, "case": asdict(case)}))
        for each in found:
            print(json.dumps(asdict(each)))
    else:
        print(f"{gpu}; {machine.sentence()}")
        print(
            f"GPT of {case.layers} layers, width {case.width}, batch {case.batch} × {case.context}, amp bf16, compile"
        )
        shown = _speeds(found) if not options.curves else _curves(found)  # pyright: ignore[reportArgumentType]
        Console(width=None if sys.stdout.isatty() else 140).print(shown)
        if options.curves:
            print(f"{text()[0]}; {verdict(found)}")  # pyright: ignore[reportArgumentType]
    return 1 if any(each.note for each in found) else 0


def _speeds(found: list[Speed]) -> Table:
    shown = Table()
    for heading in ("row", "ms/update", "±", "speed", "tokens/s", "peak GB", ""):
        shown.add_column(heading, justify="left" if heading in ("row", "") else "right")
    for each in found:
        values = (each.ms_per_update, each.ms_spread, each.speed, each.tokens_per_s, each.peak_gb)
        forms = ("{:.2f}", "{:.2f}", "{:.3f}×", "{:,.0f}", "{:.2f}")
        cells = ["" if value is None else form.format(value) for value, form in zip(values, forms, strict=True)]
        shown.add_row(each.row, *cells, each.note)
    return shown


def _curves(found: list[Curve]) -> Table:
    shown = Table()
    shown.add_column("update", justify="right")
    for curve in found:
        shown.add_column(f"{curve.row}, seed {curve.seed}", justify="right")
    for place, update in enumerate(max((curve.updates for curve in found), key=len)):
        shown.add_row(str(update), *(f"{c.losses[place]:.4f}" if place < len(c.losses) else "" for c in found))
    shown.add_row("validation", *("" if c.val_loss is None else f"{c.val_loss:.4f}" for c in found))
    if any(curve.note for curve in found):
        shown.add_row("", *(curve.note for curve in found))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=some_of(ROWS), default=["bf16", "all"], help="names with commas between")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 1,024 tokens in an update")
    parser.add_argument("--curves", action="store_true", help="loss curves on real text instead of times")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, to see that it runs")
    parser.add_argument("--one", metavar="ROW", help="be the process of one row")
    parser.add_argument("--seed", type=int, default=0, help="of the process of one curve")
    return parser


if __name__ == "__main__":
    sys.exit(main())
