"""Cost and gain of each lever: milliseconds per update, samples per second and peak memory, one lever at a time.

    python -m benchmarks.levers                            # on a GPU: a 12-layer GPT of width 768; about 6 minutes
    python -m benchmarks.levers --levers amp-bf16,remat    # only these levers
    python -m benchmarks.levers --size tiny --updates 4    # smoke test on any machine, a minute
    python -m benchmarks.levers --json > levers.jsonl      # one JSON object per line: the machine, then the rows

Each row is one `forge.Trainer.fit` with the stack of that name, over the same batches in device memory. The clock runs
between two synchronisations, after a warm-up for compilation and allocation; the base runs first and last, to show
drift. Peak memory is the most that torch allocated after the warm-up; it is unknown without CUDA. "loss" is that of the
last update: a lever that keeps the mathematics should hardly change it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import forge
from benchmarks import machine
from benchmarks.command_line import some_of
from benchmarks.overhead import silence
from forge.config.build import make_plugins

SIZES = {
    "gpt": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 32768, "batch": 8},
    "tiny": {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64, "batch": 4},
}
LEVERS: dict[str, dict[str, dict[str, Any]]] = {
    "base": {},
    "amp-bf16": {"amp": {"dtype": "bf16"}},
    "amp-fp16": {"amp": {"dtype": "fp16"}},
    "compile": {"compile": {"mode": "default"}},
    "compile-blocks": {"compile": {"blocks": "Block"}},
    "compile-reduce-overhead": {"compile": {"mode": "reduce-overhead"}},
    "bf16+compile": {"amp": {"dtype": "bf16"}, "compile": {"mode": "default"}},
    "ddp": {"ddp": {}},
    "fsdp": {"fsdp": {"blocks": "Block"}},
    "bf16+compile+ddp": {"amp": {"dtype": "bf16"}, "compile": {"mode": "default"}, "ddp": {}},
    "bf16+compile+fsdp": {"amp": {"dtype": "bf16"}, "compile": {"mode": "default"}, "fsdp": {"blocks": "Block"}},
    "bf16+max-autotune": {"amp": {"dtype": "bf16"}, "compile": {"mode": "max-autotune"}},
    "remat": {"remat": {"modules": "Block"}},
    "remat-every-2": {"remat": {"modules": "Block", "every": 2}},
    "remat-half": {"remat": {"modules": "Block", "every": 2}},
    "bf16+remat": {"amp": {"dtype": "bf16"}, "remat": {"modules": "Block"}},
    "accumulate-4": {"accumulate": {"window": 4}},
    "clip": {"clip": {"max_norm": 1.0}},
    "ema": {"ema": {"decay": 0.999}},
    "sam": {"sam": {}},
    "guard": {"guard": {}},
    "monitor-100": {"monitor": {"every": "100 updates"}},
    "spans": {"spans": {"hooks": True, "rates": True}},
    "base again": {},
}
"""Row → its stack. Rows with an accumulation window split the same batch into micro-batches."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(forge.TaskModule):
    """A plain language model with a fused AdamW."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def training_step(self, batch: Any) -> Tensor:
        tokens, following = batch
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


@dataclass(frozen=True, slots=True)
class Row:
    lever: str
    ms_per_update: float
    ms_spread: float
    samples_per_s: float
    peak_gb: float | None
    loss: float
    note: str = ""


class Timed:
    """A loader that times blocks of a few updates between two synchronisations."""

    BLOCKS = 5

    def __init__(self, batches: list[Any], micro: int, warm_up: int, updates: int):
        self.batches, self.micro, self.warm_up = batches, micro, warm_up
        self.block = max(1, updates // self.BLOCKS)
        self.times: list[float] = []

    def __len__(self) -> int:
        return (self.warm_up + self.BLOCKS * self.block) * self.micro + self.micro

    def __iter__(self) -> Iterator[Any]:
        stamps = range(self.warm_up, self.warm_up + self.BLOCKS * self.block + 1, self.block)
        for index in range(len(self)):
            update, inside = divmod(index, self.micro)
            if inside == 0 and update in stamps:
                self._stamp(first=update == self.warm_up)
            yield self.batches[index % len(self.batches)]

    def _stamp(self, first: bool) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if first:
                torch.cuda.reset_peak_memory_stats()
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Return seconds per update for each block."""
        return [(b - a) / self.block for a, b in zip(self.times, self.times[1:], strict=False)]


def measure(lever: str, size: dict[str, int], updates: int, warm_up: int) -> Row:
    stack = LEVERS[lever]
    micro = stack.get("accumulate", {}).get("window", 1)
    model = {key: value for key, value in size.items() if key != "batch"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    make = torch.Generator(device).manual_seed(1)
    shape = (size["batch"] // micro, size["context"] + 1)
    tokens = [torch.randint(size["vocabulary"], shape, device=device, generator=make) for _ in range(8)]
    batches = Timed([(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens], micro, warm_up, updates)
    task = GPT(**model)
    trainer = forge.Trainer(max_epochs=1, seed=0, device=device, run_dir=False, plugins=make_plugins(stack))
    with silence():
        result = trainer.fit(task, batches)
    seconds = sorted(batches.seconds)
    middle = seconds[len(seconds) // 2]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return Row(
        lever,
        round(1e3 * middle, 2),
        round(1e3 * (seconds[-1] - seconds[0]) / 2, 2),
        round(size["batch"] / middle, 1),
        None if peak is None else round(peak, 2),
        round(result.metrics["train/loss"], 4),
    )


def attempt(run: Callable[[], Row], lever: str) -> Row:
    """Measure a row; return an error as a row, so that the table is still printed."""
    try:
        return run()
    except Exception as error:
        return Row(lever, math.nan, math.nan, math.nan, None, math.nan, f"{type(error).__name__}: {error}"[:300])
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rows: list[Row] = []
    if options.json:
        print(json.dumps({"machine": machine.describe()}), flush=True)
    for lever in options.levers:
        rows.append(attempt(lambda: measure(lever, SIZES[options.size], options.updates, options.warm_up), lever))  # noqa: B023
        if options.json:
            print(json.dumps(asdict(rows[-1])), flush=True)
        else:
            print(f"{lever}: {rows[-1].ms_per_update} ms", file=sys.stderr, flush=True)
    if not options.json:
        print(machine.sentence())
        Console(width=None if sys.stdout.isatty() else 130).print(table(rows))
    return 0


def table(rows: list[Row]) -> Table:
    shown = Table()
    shown.add_column("lever", no_wrap=True)
    for heading in ("ms/update", "±", "speed", "samples/s", "peak GB", "memory", "loss"):
        shown.add_column(heading, justify="right")
    shown.add_column("", overflow="fold")
    base = rows[0]
    for row in rows:
        memory = f"{row.peak_gb / base.peak_gb:.2f}×" if row.peak_gb and base.peak_gb else ""
        shown.add_row(
            row.lever,
            f"{row.ms_per_update:.2f}",
            f"{row.ms_spread:.2f}",
            f"{base.ms_per_update / row.ms_per_update:.2f}×",
            f"{row.samples_per_s:,.0f}",
            "" if row.peak_gb is None else f"{row.peak_gb:.2f}",
            memory,
            f"{row.loss:.3f}",
            row.note,
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--levers", type=some_of(LEVERS), default=",".join(LEVERS), help="names with commas between")
    parser.add_argument("--size", choices=list(SIZES), default="gpt", help="what is trained (default gpt)")
    parser.add_argument("--updates", type=int, default=50, help="updates timed for each lever (default 50)")
    parser.add_argument("--warm-up", type=int, default=10, help="updates before the clock starts (default 10)")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TERM", "xterm-256color")
    sys.exit(main())
