"""Figures that guides print, each beside forge's own: fills the table of docs/figures.md.

    python -m benchmarks.figures --data FOLDER               # every row; FOLDER has FashionMNIST/raw and MNIST/raw
    python -m benchmarks.figures --only no_grad_mlp,adamw    # these rows; the others stay as they are

A row whose command is a `forge fit` is measured by running it: what it logged after three epochs, and after the last.
Others have a function here. Passes that are compared take turns in one process, with one thread, in CPU time: the
median over rounds of a pass over the first of its round, which runs twice to show the noise. A row that fails says why.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import benchmark
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import machine
from benchmarks.command_line import some_of
from forge_recipes.fashion_mlp import FashionMLP

PAGE = Path(__file__).parents[1] / "docs" / "figures.md"
LOGGED = "{train/loss_epoch:.4f} {train/accuracy_epoch:.4f}, {val/loss:.4f} {val/accuracy:.4f}"
MODES = {"graph": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
MODELS = {"mlp": (4096, 784), "resnet18": (8, 3, 224, 224), "vit_b_16": (4, 3, 224, 224)}
"""Models of `no_grad`, with the shape of a batch."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="folder of the data sets (default: $FORGE_DATA, or a download)")
    measures = measures_of(PAGE.read_text())
    parser.add_argument("--only", type=some_of(measures), default=list(measures), metavar="ROWS")
    asked = parser.parse_args(words)
    if asked.data:
        os.environ["FORGE_DATA"] = asked.data
    for row in asked.only:
        try:
            found = measures[row]()
        except RuntimeError as error:
            found = f"not measured here: {error}"
        print(row, found, sep=": ", flush=True)
        before, line, after = re.split(rf"^(\| {row} \|.*)$", PAGE.read_text(), maxsplit=1, flags=re.MULTILINE)
        *kept, _, command, _ = cells(line)
        PAGE.write_text(f"{before}| {' | '.join((*kept, found, command, machine.sentence()))} |{after}")
    return 0


def cells(line: str) -> list[str]:
    """Return the cells of a line of the table: row, what, printed, forge, command, machine."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


def measures_of(page: str) -> dict[str, Callable[[], str]]:
    """Return the rows of a page that are measured here, and what measures each."""
    rows = {row: command.strip("`") for row, *_, command, _ in map(cells, re.findall(r"^\| .*$", page, re.MULTILINE))}
    fits = {row: partial(epochs, command) for row, command in rows.items() if command.startswith("forge fit ")}
    return {row: (fits | MEASURES)[row] for row in rows if row in fits or row in MEASURES}


def epochs(command: str) -> str:
    """Run a `forge fit`; return train loss and accuracy, validation loss and accuracy of some epochs."""
    ends: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", *shlex.split(command), "--run-dir", f"{folder}/run"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        for line in map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines()):
            ends.setdefault(line["epoch"], {}).update(line)
    shown = [epoch for epoch in ends if 1 <= epoch <= 3 or epoch == max(ends)]
    return "; ".join(f"{epoch}: {LOGGED.format_map(ends[epoch])}" for epoch in shown)


def in_turns(passes: dict[str, Callable[[], Any]], rounds: int) -> dict[str, str]:
    """Return the CPU time of each pass as a share of the first one's: the median over rounds."""
    taken: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds + 1):
        for name in random.sample(list(passes), len(passes)):
            start = time.process_time()
            passes[name]()
            taken[name].append(time.process_time() - start)
    first = next(iter(taken.values()))[1:]  # without the first round, which warms up
    return {name: f"{median(map(float.__truediv__, own[1:], first)):.2f}" for name, own in taken.items()}


def make(name: str) -> tuple[nn.Module, Tensor]:
    import torchvision

    model = FashionMLP() if name == "mlp" else torchvision.models.get_model(name)
    return model.eval(), torch.randn(MODELS[name])


def memory(name: str, mode: str) -> int:
    """Run one forward pass in this fresh process; return its peak with weights and batch, in bytes (Linux)."""
    torch.set_num_threads(1)
    model, batch = make(name)
    with torch.inference_mode():
        model(batch[:1])  # libraries load, and buffers of threads
    with MODES[mode]():
        before, _, after = peak(), model(batch), peak()
    return after - before + sum(tensor.nbytes for tensor in (*model.state_dict().values(), batch))


def peak() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def no_grad(name: str, rounds: int = 5) -> str:
    # freed memory goes back to the system at once, so that the peak is that of live tensors
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        graph, without = (fresh.apply(memory, (name, mode)) / 2**20 for mode in ("graph", "no_grad"))
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    model, batch = make(name)
    passes = {mode: partial(MODES[mode]()(model.forward), batch) for mode in MODES}
    shares = in_turns({"graph": passes["graph"], "again": passes["graph"], **passes}, rounds)
    times = ", ".join(f"{mode} {share}" for mode, share in shares.items() if mode != "graph")
    return f"time {times}; memory {graph:,.0f} → {without:,.0f} MiB, {1 - without / graph:.0%} less"


def matmul(sizes: tuple[int, ...] = (512, 1024, 2048)) -> str:
    found = []
    for size, dtype in (*((size, torch.float32) for size in sizes), (sizes[0], torch.bfloat16)):
        operand = torch.randn(size, size).to(dtype)
        timer = benchmark.Timer("a @ a", globals={"a": operand}, timer=time.process_time)
        found.append(f"{size} in {dtype}: {timer.blocked_autorange(min_run_time=1).median:.4f} s")
    return "; ".join(found).replace("torch.", "")


def workers(rounds: int = 3) -> str:
    """Return how much more CPU time an epoch takes, with that of its workers, if they start anew."""
    found = []
    for start in ("fork", "spawn"):
        loader = partial(DataLoader, TensorDataset(torch.zeros(256, 784)), 64, multiprocessing_context=start)
        kept, anew = loader(num_workers=2, persistent_workers=True), loader(num_workers=2)
        ends = [sum(os.times()[:4]) for each in (kept, *(kept, anew) * rounds) if list(each)]
        seconds = [end - began for began, end in pairwise(ends)]
        found.append(f"{median(seconds[1::2]) - median(seconds[::2]):.2f} s with {start}")
    return f"{', '.join(found)} (2 workers, 1 MB of data)"


def adamw() -> str:
    layer = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    held += [tensor for parameter in layer.parameters() for tensor in (parameter.data, parameter.grad)]
    each = sum(tensor.nbytes for tensor in held) / sum(parameter.numel() for parameter in layer.parameters())
    return f"{each:.1f} bytes per parameter: {7 * each:.0f} GB"


MEASURES: dict[str, Callable[[], str]] = {  # of rows that no `forge fit` measures
    "parameters": lambda: f"{sum(parameter.numel() for parameter in FashionMLP().parameters()):,}",
    **{f"no_grad_{name}": partial(no_grad, name) for name in MODELS},
    "matmul": matmul,
    "workers": workers,
    "adamw": adamw,
    "float16": lambda: "{0.tiny:.3g} to {0.max:,.0f}".format(torch.finfo(torch.float16)),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
