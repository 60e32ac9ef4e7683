"""Memory of an evaluation with and without a graph: peak of the process, and bytes that autograd keeps.

    python -m benchmarks.no_grad                                   # ResNet-18, ViT-B/16 and an MLP; two minutes
    python -m benchmarks.no_grad --models resnet18 --json

Each row is one forward pass in eval mode, in a process of its own: with a graph (a plain call), under `no_grad`, and
under `inference_mode`, which is what forge's evaluations use. "peak" is the growth of the process's peak memory from
before the pass, with weights and batch already in memory; "with weights" adds these, which is what a user sees.
"saved" is what autograd keeps for a backward pass, by `saved_tensors_hooks`, each storage once and weights left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.command_line import some_of

MODES = {"graph": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
MODELS = {"mlp": (4096, 784), "resnet18": (32, 3, 224, 224), "vit_b_16": (16, 3, 224, 224)}
"""Models, with the shape of a batch."""
MIB = 2**20


def make(name: str) -> nn.Module:
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    import torchvision

    return torchvision.models.get_model(name)


def peak() -> int:
    """Return the largest memory that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(name: str, mode: str) -> dict[str, Any]:
    """Run one pass in this process."""
    torch.manual_seed(0)
    model, batch = make(name).eval(), torch.randn(MODELS[name])
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    held = sum(tensor.nbytes for tensor in model.state_dict().values()) + batch.nbytes
    with torch.inference_mode():
        model(batch[:1])  # libraries load, and buffers of threads
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = peak()
    context: AbstractContextManager[Any] = MODES[mode]()
    with context, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = model(batch)
    grown = peak() - before
    del result
    return {"model": name, "mode": mode, "peak": grown, "held": held, "saved": sum(saved.values())}


def in_a_process(name: str, mode: str) -> dict[str, Any]:
    # freed memory goes back to the system at once, so that the peak is that of live tensors
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.no_grad", "--one", name, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.no_grad", description=__doc__)
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS), metavar="NAMES")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.one:
        print(json.dumps(measure(*asked.one)))
        return 0
    rows = [in_a_process(name, mode) for name in asked.models for mode in MODES]
    if asked.json:
        for line in ({"machine": machine.describe()}, *rows):
            print(json.dumps(line))
        return 0
    table = Table(title=machine.sentence())
    for column in ("model", "batch", "mode", "peak MiB", "less", "with weights MiB", "less", "saved MiB"):
        table.add_column(column, justify="left" if column in ("model", "mode") else "right")
    for row in rows:
        base = next(other for other in rows if (other["model"], other["mode"]) == (row["model"], "graph"))
        whole, base_whole = row["peak"] + row["held"], base["peak"] + base["held"]
        numbers = (f"{row['peak'] / MIB:.0f}", f"{1 - row['peak'] / base['peak']:.0%}")
        more = (f"{whole / MIB:.0f}", f"{1 - whole / base_whole:.0%}", f"{row['saved'] / MIB:.0f}")
        table.add_row(row["model"], str(MODELS[row["model"]][0]), row["mode"], *numbers, *more)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
