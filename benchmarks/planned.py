"""Accuracy of `forge plan`: predicted peak memory against that of CUDA's allocator.

    python -m benchmarks.planned            # on a GPU: both models, with and without remat and amp; about a minute
    python -m benchmarks.planned --json     # one JSON object per line: the machine, then the rows
    python -m benchmarks.planned --size tiny    # smoke test with small models

Each row predicts one step on fake tensors, then trains a few updates with the same stack by `forge.Trainer.fit` and
reads `torch.cuda.max_memory_allocated`. The bar is a ratio within 10 % of 1. Without CUDA only the prediction is shown.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
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
from benchmarks.levers import GPT
from benchmarks.overhead import silence
from forge.config.build import make_plugins
from forge.planning import run_dry

UPDATES = 4
BAR = 0.1
STACKS: dict[str, dict[str, dict[str, Any]]] = {
    "fp32": {},
    "fp32 + remat": {"remat": {}},
    "bf16": {"amp": {"dtype": "bf16"}},
    "bf16 + remat": {"amp": {"dtype": "bf16"}, "remat": {}},
}


class GPT2(GPT):
    """GPT-2 of 124 million parameters, its head tied to the embedding; torch's default AdamW."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, context: int = 1024, words: int = 50257):
        super().__init__(layers, width, heads, context, words)
        self.head.weight = self.embed.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Residual(nn.Module):
    """Two convolutions of 3 × 3 with a shortcut."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.around = nn.Sequential()
        if stride > 1 or before != width:
            self.around = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.around(x), inplace=True)


class ResNet18(forge.TaskModule):
    """ResNet-18 for 1000 classes; SGD with momentum."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Residual(before, after, 1 if i == 0 else 2), Residual(after, after, 1))
                for i, (before, after) in enumerate(itertools.pairwise(widths))
            )
        )
        self.head = nn.Linear(8 * width, 1000)

    def training_step(self, batch: Any) -> Tensor:
        images, labels = batch
        x = self.stages(self.pool(self.stem(images)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Model:
    make: Callable[[], forge.TaskModule]
    batch: Callable[[], Any]


def tokens(samples: int, context: int, words: int) -> Any:
    drawn = torch.randint(words, (samples, context + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def images(samples: int, side: int) -> Any:
    return torch.randn(samples, 3, side, side), torch.randint(1000, (samples,))


SIZES: dict[str, dict[str, Model]] = {
    "full": {
        "GPT-2 124M": Model(GPT2, lambda: tokens(8, 1024, 50257)),
        "ResNet-18": Model(ResNet18, lambda: images(256, 224)),
    },
    "tiny": {
        "GPT-2 124M": Model(lambda: GPT2(2, 64, 2, 32, 128), lambda: tokens(4, 32, 128)),
        "ResNet-18": Model(lambda: ResNet18(8), lambda: images(4, 32)),
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    stack: str
    predicted: int
    worst: str
    "Predicted phase of the peak."
    measured: int | None
    ratio: float | None
    "Predicted over measured."


def compare(name: str, model: Model, stack: str) -> Row:
    """Predict a row, then measure it if a GPU is available."""
    torch.manual_seed(0)
    batch = model.batch()
    expected = run_dry(model.make, batch, STACKS[stack])
    seen = measure(model, batch, STACKS[stack]) if torch.cuda.is_available() else None
    ratio = None if seen is None else round(expected.peak / seen, 4)
    return Row(name, stack, expected.peak, expected.worst, seen, ratio)


def measure(model: Model, batch: Any, stack: dict[str, dict[str, Any]]) -> int:
    """Return the peak of a few real updates, without memory allocated before."""
    _clear()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer = forge.Trainer(
        max_updates=UPDATES, device="cuda", run_dir=False, validate_every=None, plugins=make_plugins(stack)
    )
    with silence():
        trainer.fit(model.make(), [batch] * (UPDATES + 1))
    peak = torch.cuda.max_memory_allocated() - before
    del trainer
    _clear()
    return peak


def _clear() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each row allocates its own
    torch.cuda.empty_cache()


def compared(size: str) -> Iterator[Row]:
    for name, model in SIZES[size].items():
        for stack in STACKS:
            yield compare(name, model, stack)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--size", choices=list(SIZES), default="full", help="what is trained (default full)")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    if options.json:
        print(json.dumps({"machine": machine.describe()}), flush=True)
    for row in compared(options.size):
        rows.append(row)
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
    if not options.json:
        print(machine.sentence())
        Console(width=None if sys.stdout.isatty() else 100).print(table(rows))
    return 1 if any(row.ratio is not None and abs(row.ratio - 1) > BAR for row in rows) else 0


def table(rows: list[Row]) -> Table:
    shown = Table()
    shown.add_column("model", no_wrap=True)
    shown.add_column("stack", no_wrap=True)
    for heading in ("predicted GiB", "in", "measured GiB", "ratio"):
        shown.add_column(heading, justify="right")
    for row in rows:
        measured = "" if row.measured is None else f"{row.measured / 2**30:.3f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        shown.add_row(row.model, row.stack, f"{row.predicted / 2**30:.3f}", row.worst, measured, ratio)
    return shown


if __name__ == "__main__":
    sys.exit(main())
