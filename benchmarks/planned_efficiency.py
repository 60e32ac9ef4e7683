"""The shares of a GPU's data sheet that a step reaches, which `forge plan --cluster` starts from.

    python -m benchmarks.planned --efficiency           # on a GPU: about 3 minutes
    python -m benchmarks.planned --efficiency --json

A language model as wide as Llama 3 8B, with fewer layers, trains in bf16, eager and compiled. torch's profiler gives
the time of its kernels: matrix products, attention, and all else. What the planner counts for the same step (floating
point operations, bytes) over these times, over the data sheet, are the shares. The host's time of an operation is that
of a model so narrow that its kernels take none.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.llama import Llama3_8B, data
from forge.config.recipe import load_recipe
from forge_cluster.planning import Variant, count_workload, load_cluster
from forge_cluster.planning.workload import PHASES, Workload

SHORT = Variant("bf16", remat=False)
UPDATES = 8
MATMUL = ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk")
ATTENTION = ("flash", "fmha", "attention", "sdpa", "softmax_fprop", "cudnn_generated_fort")


class Wide(Llama3_8B):
    """Four blocks of Llama 3 8B, and its head."""

    layers = 4


class Narrow(Llama3_8B):
    """So little work for each operation that the host is the limit."""

    layers, width, heads, key_heads, hidden = 8, 128, 4, 4, 256


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    value: float
    counted: str
    "What was counted, over what time."


def rows(gpu: str = "h200") -> Iterator[Row]:
    """Measure every share on this machine's GPU, whose data sheet is that of `gpu`."""
    sheet = load_cluster(gpu)
    for length, samples in ((8192, 2), (2048, 8)):
        work = counted(Wide, length)
        q = work.at(SHORT, samples)
        flops = {kind: sum(q[f"{kind} {p}"] for p in PHASES) for kind in ("matmul", "attention")}
        traffic = q["bytes forward"] + q["bytes backward"]
        eager, compiled = (step_of(Wide, length, samples, fused) for fused in (False, True))
        for name, seen in (("eager", eager), ("compiled", compiled)):
            at = f"{samples} × {length} tokens, {name}"
            for kind in flops:
                share = flops[kind] / seen[kind] / sheet.peak("bf16")
                yield Row(f"{kind}, {at}", share, f"{flops[kind]:.3e} FLOP, {1000 * seen[kind]:.2f} ms")
            share = traffic / seen["other"] / sheet.memory_bandwidth
            yield Row(f"memory, {at}", share, f"{traffic:.3e} bytes, {1000 * seen['other']:.2f} ms")
            gap = seen["wall"] / (seen["matmul"] + seen["attention"] + seen["other"])
            yield Row(f"wall over kernels, {at}", gap, f"{1000 * seen['wall']:.2f} ms")
            share = q["bytes optimizer"] / seen["optimizer"] / sheet.memory_bandwidth
            yield Row(f"optimizer, {at}", share, f"{q['bytes optimizer']:.3e} bytes, {1000 * seen['optimizer']:.2f} ms")
        yield Row(
            f"compiled over eager, {samples} × {length} tokens", compiled["other"] / eager["other"], "other kernels"
        )
    work = counted(Narrow, 128)
    q = work.at(SHORT, 1)
    calls = q["ops forward"] + q["ops backward"]
    for fused in (False, True):
        wall = step_of(Narrow, 128, 1, fused)["wall"]
        name = "compiled" if fused else "eager"
        yield Row(f"host µs an operation, {name}", 1e6 * wall / calls, f"{calls:.0f} operations, {1000 * wall:.3f} ms")


def counted(task: type[Llama3_8B], length: int) -> Workload:
    """Return what the planner counts, in bf16."""
    settings = ["data.batch_size=4", f"data.length={length}"]
    return count_workload(load_recipe("default", settings, [], [], task=task, data=data), ("fp32", "bf16"))


def step_of(kind: type[Llama3_8B], length: int, samples: int, compiled: bool) -> dict[str, float]:
    """Return the seconds of an update's kernels by class, and the wall time of forward and backward."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    task = kind().to("cuda", torch.bfloat16)
    model: Callable[[Any], Any] = task.training_step
    if compiled:
        for block in task.blocks:
            block.compile()
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(128256, (2, samples, length), device="cuda")

    def pass_both_ways() -> None:
        model((tokens[0], tokens[1])).backward()

    def update() -> None:
        pass_both_ways()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        update()
    walls = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(UPDATES):
            pass_both_ways()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) / UPDATES)
    found: dict[str, float] = defaultdict(float)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(UPDATES):
            update()
        torch.cuda.synchronize()
    for event in recorded.events() or ():
        if event.device_type is torch.autograd.DeviceType.CUDA:
            found[_class(event.name)] += event.device_time * 1e-6 / UPDATES
    found["wall"] = statistics.median(walls)
    return found


def _class(kernel: str) -> str:
    name = kernel.lower()
    if "adam" in name:
        return "optimizer"
    if any(part in name for part in ATTENTION):
        return "attention"
    return "matmul" if any(part in name for part in MATMUL) else "other"
