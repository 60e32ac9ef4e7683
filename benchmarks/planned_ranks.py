"""Predicted time and memory of one, two and more ranks beside runs of them, on this machine.

    python -m benchmarks.planned --cluster                  # 1 and 2 ranks over gloo, one thread each: about 3 minutes
    python -m benchmarks.planned --cluster --ranks 1,2,4,8  # more ranks than cores are reported, without a bar
    python -m benchmarks.planned --cluster --cuda           # one GPU: memory by CUDA's allocator, time of an update

Measured first, apart from any run that is predicted: the matrix product, the copy and the small operation of one
thread; gloo's all-reduce of two sizes; and one step of the task at half the samples of the smallest prediction.
Then each row is predicted, and only after that trained. Bars: memory within 10 %, time within 20 % for 1 and 2 ranks.

Memory on the CPU is the peak of torch's own allocations, by its profiler.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import forge
from benchmarks.levers import GPT
from benchmarks.overhead import silence
from benchmarks.ranks import on_ranks
from forge.config import Recipe
from forge.config.build import make_plugins
from forge.config.recipe import load_recipe
from forge.data import Splits
from forge.planning.footprint import WORKSPACE
from forge_cluster.planning import Cluster, Layout, Link, Model, Variant, count_workload, memory_of
from forge_cluster.planning.calibration import UpdateClock, measured_step
from forge_cluster.planning.hardware import Efficiency

TIME_BAR, MEMORY_BAR = 0.2, 0.1
UPDATES, FEW = 14, 3
CONTEXT, WORDS = 128, 1024
SIZES = {"cpu": {"layers": 8, "width": 192, "heads": 6}, "cuda": {"layers": 12, "width": 1024, "heads": 16}}
BATCH = {"cpu": 16, "cuda": 16}
PARTS = 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"ddp": {}},
    "fsdp": {"fsdp": {"blocks": "Block"}},
    "pipeline": {"pipeline": {"stages": 2, "microbatches": PARTS}},
    "pipeline, sharded": {"pipeline": {"stages": 2, "microbatches": PARTS, "shard": True}},
}


def layout_of(strategy: str, world: int) -> Layout | None:
    """Return the layout of a row; None where the ranks are too few for it."""
    plain = Variant("fp32", remat=False)
    if not strategy.startswith("pipeline"):
        return Layout(strategy, plain, shard=world)
    divided, pipelines = strategy.endswith("sharded"), world // 2
    if divided and pipelines == 1:
        return None
    return Layout("fsdp" if divided else "ddp", plain, pipelines, pipeline=2, schedule="1F1B", micros=PARTS)


class Small(GPT):
    """The GPT of the levers, small enough for one core."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(**SIZES[device], context=CONTEXT if device == "cpu" else 1024, vocabulary=WORDS)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, foreach=True)


class Large(Small):
    """The same for a GPU."""

    def __init__(self) -> None:
        super().__init__("cuda")


def batch_of(samples: int, context: int) -> Any:
    drawn = torch.randint(WORDS, (samples, context + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def recipe_of(cuda: bool) -> Recipe:
    """Return the task and its data, without plugins."""
    context, size = (1024, BATCH["cuda"]) if cuda else (CONTEXT, BATCH["cpu"])
    task, settings = (Large if cuda else Small), ["trainer.seed=1"]
    recipe = load_recipe("default", settings, [], [], task=task, data=lambda: Splits(train=[batch_of(size, context)]))
    return replace(recipe, config={**recipe.config, "plugins": {}})


@dataclass(frozen=True, slots=True)
class Row:
    strategy: str
    ranks: int
    predicted_ms: float
    measured_ms: float
    time_ratio: float
    predicted_mib: float
    measured_mib: float
    memory_ratio: float
    bar: bool
    "Whether the bars hold for this row: not for more ranks than cores."


def rows(ranks: list[int], cuda: bool) -> Iterator[Row]:
    """Calibrate, then predict and measure each strategy."""
    device = "cuda" if cuda else "cpu"
    torch.set_num_threads(1)
    size = BATCH[device]
    recipe = recipe_of(cuda)
    cluster = measured_cluster(max(ranks), cuda)
    cluster = replace(cluster, measured=measured_step(recipe, size // 4, UPDATES))
    work = count_workload(recipe, ("fp32",))
    for world in ranks:
        here = replace(cluster, gpus_per_node=world)
        for strategy in ["single"] if world == 1 else STRATEGIES:
            layout = layout_of(strategy, world)
            if layout is None:
                continue
            workspace = 0 if not cuda else WORKSPACE
            seconds = Model(work, here).calibrated().time(layout).total
            memory = memory_of(work, layout) - WORKSPACE + workspace
            ran, peak = measured(strategy, world, cuda)
            yield Row(
                strategy,
                world,
                round(1000 * seconds, 1),
                round(1000 * ran, 1),
                round(seconds / ran, 3),
                round(memory / 2**20, 1),
                round(peak / 2**20, 1),
                round(memory / peak, 3),
                world <= (os.cpu_count() or 1),
            )


# -- what is measured first -------------------------------------------------------------------------------------------


def measured_cluster(ranks: int, cuda: bool) -> Cluster:
    """Return this machine as a cluster: compute by three micro-measurements, links by gloo's all-reduce."""
    device = torch.device("cuda" if cuda else "cpu")
    a = torch.randn(1024, 1024, device=device)
    big = torch.randn(8 * 2**20, device=device)
    small = torch.randn(8, device=device)
    flops = 2 * 1024**3 / _seconds(lambda: a @ a, device)
    bandwidth = 2 * big.nbytes / _seconds(lambda: big + 1, device)
    launch = _seconds(lambda: small + 1, device, 200)
    link = Link(5e9, 1e-4) if ranks == 1 else measured_link()
    return Cluster(
        nodes=1,
        gpus_per_node=1,
        memory=2**34,
        flops={"fp32": flops},
        memory_bandwidth=bandwidth,
        within=link,
        between=link,
        efficiency=Efficiency(matmul=1.0, attention=1.0, memory=1.0, links=1.0, overlap=0.0, many=1.0),
        launch=launch,
        backend="gloo",
        cores=None if cuda else os.cpu_count(),
        name="this machine",
    )


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measured_link() -> Link:
    """Return bandwidth and latency of a ring of two processes, from all-reduces of a small and a large tensor."""
    small, large = on_ranks(_all_reduces, 2, join=True)
    sizes = 4 * 1024, 4 * 2**20
    # two ranks: a ring of 2 (n - 1)/n bytes and 2 (n - 1) hops
    bandwidth = (sizes[1] - sizes[0]) / max(1e-9, large - small)
    return Link(bandwidth, max(1e-6, small - sizes[0] / bandwidth) / 2)


def _all_reduces() -> tuple[float, float]:
    found = []
    for count in (1024, 2**20):
        tensor = torch.ones(count)
        for _ in range(5):
            dist.all_reduce(tensor)
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
        found.append(statistics.median(times))
    return found[0], found[1]


# -- runs -------------------------------------------------------------------------------------------------------------


def measured(strategy: str, world: int, cuda: bool) -> tuple[float, float]:
    """Train on `world` ranks; return the median seconds of an update, and the peak memory of the fullest rank."""
    if world == 1:
        return _trained(strategy, cuda).seconds, _peak(strategy, cuda)
    return on_ranks(_run, world, strategy)


def _run(strategy: str) -> tuple[float, float]:
    return _trained(strategy, cuda=False).seconds, _peak(strategy, cuda=False)


def _trained(strategy: str, cuda: bool, updates: int = UPDATES) -> UpdateClock:
    watch = UpdateClock()
    device = "cuda" if cuda else "cpu"
    trainer = forge.Trainer(
        max_updates=updates,
        device=device,
        run_dir=False,
        validate_every=None,
        plugins=[*make_plugins(STRATEGIES.get(strategy, {})), watch],
    )
    batch = batch_of(BATCH[device], 1024 if cuda else CONTEXT)
    with silence():
        trainer.fit(Large() if cuda else Small(), [batch] * (updates + 1))
    return watch


def _peak(strategy: str, cuda: bool) -> float:
    """Return the peak of torch's allocations in a few updates, from before the task is made."""
    if cuda:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _trained(strategy, cuda, FEW)
        return torch.cuda.max_memory_allocated() - before
    return peaks(strategy)[1]


def peaks(strategy: str) -> tuple[float, float]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _trained(strategy, False, FEW)
    return held_between(recorded, _addresses())


def _addresses() -> set[int]:
    """Return where the tensors are that live now."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    plain = [getattr(each, "_local_tensor", each) for each in found]
    return {each.untyped_storage().data_ptr() for each in plain if not each.is_meta}


def held_between(recorded: Any, alive: set[int]) -> tuple[float, float]:
    """Return two peaks of the recorded allocations: without those whose release was not seen and that are not alive,
    and with them, as if they were held for ever. torch's profiler does not see what another thread releases, as gloo's
    do with buffers whose last users they are: the more often, the busier the machine is."""
    held: dict[int, tuple[int, int]] = {}
    known: list[tuple[int, int]] = []
    every: list[tuple[int, int]] = []
    for time_ns, address, size in sorted(_allocations(recorded)):
        every.append((time_ns, size))
        if size > 0:
            held[address] = time_ns, size
        elif address in held:
            known += [held.pop(address), (time_ns, size)]
    known += [change for address, change in held.items() if address in alive]
    low, high = (max(itertools.accumulate((s for _, s in sorted(each))), default=0) for each in (known, every))
    return low, high


def _allocations(recorded: Any) -> Iterator[tuple[int, int, int]]:
    """Yield time, address and bytes of every allocation; those of a release are negative."""
    from torch._C._profiler import _EventType

    left = list(recorded.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
