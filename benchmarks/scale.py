"""Cost of forge's strategies over torch's own in a hand-written loop: the same work on two or four ranks.

    python -m benchmarks.scale                                # all strategies, about 8 minutes
    python -m benchmarks.scale --strategies ddp --rounds 30
    python -m benchmarks.scale --json > scale.jsonl           # one JSON object per line: the machine, then the rows
    python -m benchmarks.scale --updates 10 --rounds 1        # smoke test
    python -m benchmarks.scale --gpu --rounds 3               # one rank over NCCL: cost of a strategy on one GPU
    python -m benchmarks.scale --meshes                       # meshes x models of others (benchmarks/meshes.py)
    python -m benchmarks.scale --meshes --write               # and write the table into docs/distributed.md

Two processes over gloo (four for pipeline_shard) train a transformer, accumulating two micro-batches and clipping: by
hand, by hand again (the difference is noise), and with forge, from the same weights. They take turns update by update,
inside one run: when forge requests the first batch of its next update, the hand-written loops make one update each, in
random order. So other load on the machine affects all of them alike. Every turn starts at a barrier. Its time is wall
time on rank 0, since waiting for other ranks is part of it; its CPU time is that of all main threads, which other load
affects less.

The table shows the median over all turns, the median of each turn's ratio to the hand-written loop in the same update,
and the ratio of the fastest tenths ("quiet"), of wall and CPU time. This excludes work between turns or outside the
main thread, so the CPU time of forge's heartbeat thread is printed below the table.

With `--meshes` the same is done on meshes of 8 ranks, beside the differences and bytes of models of others; its loops
by hand are in benchmarks/meshes_by_hand.py, and the tensor axis divides the MLPs.

With `--gpu` one rank trains a GPT of 12 layers, width 768 and batch 32 in bf16, compiled, without a strategy, with ddp
and with fsdp, in turn.

Collectives are counted by the sequence number of torch's process group. Bytes are those of gradients and parameters
that one rank passes to torch in an update, by torch's profiler, next to the formula: DDP all-reduces every gradient
once (p); zero sends the new weights too (2 p; by hand, DDP with torch's ZeroRedundancyOptimizer); FSDP2 gathers a
block's parameters for forward and again for backward in every micro-batch (2 m b), those outside blocks once (m r),
and scatters all gradients once (p = b + r); m micro-batches make an update. context_parallel all-reduces gradients (p),
and in each of l layers and micro-batches passes keys and values k of a slice on n - 1 times, twice, and their gradients
n times (m l (3 n - 2) k on n ranks); by hand, DDP and a function around torch's private ring.

A pipeline (1F1B, two stages, 4 parts of each micro-batch) sends the activations a of a micro-batch, gets their
gradients, and sums those of what is outside of blocks (2 m a + r). By hand, torch.distributed.pipelining; embedding and
head are on both ranks, with gradients summed and the norm taken over both, as in forge, which computes the embedding in
the last stage too. pipeline_shard has two pipelines on 4 ranks, whose stages FSDP2 divides: each rank gathers the
weights of its stage and what is outside once per update (b/2 + r), scatters the gradients that it has, and sums shards
of r.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import logging
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import forge
from benchmarks import levers, machine, meshes, meshes_by_hand
from benchmarks.cases import Batch
from benchmarks.command_line import some_of
from benchmarks.ranks import on_ranks
from benchmarks.scale_by_hand import (
    BATCH,
    LENGTH,
    MAX_NORM,
    PARTS,
    WARM_UP,
    WINDOW,
    Batches,
    Hand,
    Weights,
    context_by_hand,
    ddp_by_hand,
    fsdp_by_hand,
    loss,
    make_network,
    pipeline_by_hand,
)
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.pipeline import Pipeline
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP, Accumulate, Clip

LOOPS: dict[str, Callable[[Batches], Hand]] = {
    "ddp": ddp_by_hand,
    "zero": functools.partial(ddp_by_hand, zero=True),
    "fsdp": fsdp_by_hand,
    "context_parallel": context_by_hand,
    "pipeline": pipeline_by_hand,
    "pipeline_shard": functools.partial(pipeline_by_hand, shard=True),
}
WORLDS = {"pipeline_shard": 4}
"""Ranks of a strategy; two of the others."""
COLLECTIVES = {
    "ddp": ("gloo:all_reduce",),
    "zero": ("gloo:all_reduce", "gloo:broadcast"),
    "fsdp": ("c10d::_allgather_base", "c10d::_reduce_scatter_base"),
    "context_parallel": ("gloo:all_reduce", "gloo:all_to_all"),
    "pipeline": ("gloo:all_reduce", "gloo:send", "gloo:recv"),
    "pipeline_shard": ("gloo:all_reduce", "gloo:send", "gloo:recv", "c10d::_allgather_base"),
}
"""Names in torch's profiler of collectives with known sizes; gloo scatters by reducing, which is counted once."""
FEW = 64

BY_HAND = ("by hand", "by hand again")


class Times(NamedTuple):
    """Milliseconds of a turn: wall time, CPU time of the main threads, and of rank 0's heartbeat thread."""

    wall: float
    cpu: float
    watch: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender."""

    strategy: str
    contender: str
    ms: float
    ratio: float
    quiet_ratio: float
    cpu_ratio: float
    quiet_cpu_ratio: float
    watch_ms_per_second: float
    collectives: float
    megabytes: float
    expected_megabytes: float
    identical: bool


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    talk = Console(stderr=True)
    if options.json:
        print(json.dumps({"machine": machine.describe()}))
    else:
        print(machine.sentence())
    if options.gpu:
        for row in on_gpu(options.updates, options.rounds):
            print(json.dumps(row))
        return 0
    if options.meshes:
        rows, costs = [], []
        for mesh in meshes.MESHES[: options.first]:
            rows += (found := list(meshes.measure([mesh])))
            costs.append(cost := on_mesh(mesh, options.updates, options.rounds))
            talk.print(meshes.table(found, [cost]), style="dim", soft_wrap=True)  # a later mesh may fail
            for row in (*found, cost) if options.json else ():
                print(json.dumps(asdict(row)), flush=True)
        text = meshes.table(rows, costs)
        if not options.json:
            print(text)
        if options.write:
            meshes.write(f"{text}\n\n{machine.sentence()}; {options.rounds} rounds of {options.updates} updates.")
        return 0
    for strategy in options.strategies:
        talk.print(f"{strategy}: {options.rounds} rounds of {options.updates} updates", style="dim")
        rows = run(strategy, options.updates, options.rounds)
        if options.json:
            for row in rows:
                print(json.dumps(asdict(row)))
        else:
            Console(width=max(110, Console().width)).print(_table(strategy, rows, options))
    return 0


def on_gpu(updates: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure milliseconds per update of one rank on one GPU, the median over rounds, and its ratio to no strategy."""
    size = {**levers.SIZES["gpt"], "batch": 32}
    base, *others = "bf16+compile", "bf16+compile+ddp", "bf16+compile+fsdp"
    times: dict[str, list[float]] = {name: [] for name in (base, *others)}
    for _ in range(rounds):
        for name, each in times.items():
            each.append(levers.measure(name, size, updates, 20).ms_per_update)
    for name, each in times.items():
        ratios = [own / plain for own, plain in zip(each, times[base], strict=True)]
        yield {"stack": name, "ms": each, "throughput": round(1 / statistics.median(ratios), 4)}


def run(strategy: str, updates: int, rounds: int) -> list[Row]:
    """Run all contenders on two ranks."""
    return on_ranks(_rank, WORLDS.get(strategy, 2), strategy, updates, rounds, join=True)


def on_mesh(mesh: meshes.Mesh, updates: int, rounds: int) -> meshes.MeshCost:
    """Measure the CPU time of forge on a mesh beside torch's own by hand."""
    return on_ranks(_mesh_rank, math.prod(mesh.values()), mesh, updates, rounds, join=True)


def _rank(strategy: str, updates: int, rounds: int) -> list[Row]:
    hand, ours = LOOPS[strategy], functools.partial(with_forge, STACKS[strategy])
    names = COLLECTIVES[strategy]
    seen: dict[str, Traffic] = dict.fromkeys(BY_HAND, _traffic(lambda batches: _to_the_end(hand(batches)), names))
    seen["forge"] = _traffic(ours, names)
    times, weights = _taken_in_turns(hand, ours, updates, rounds)
    return [_row(strategy, name, times, seen, weights) for name in seen]


def _taken_in_turns(
    hand: Callable[[Batches], Hand], ours: Callable[[Batches], Weights], updates: int, rounds: int
) -> tuple[dict[str, list[Times]], dict[str, Weights]]:
    """Return the times of all contenders, and the weights that they ended with."""
    times: dict[str, list[Times]] = {name: [] for name in (*BY_HAND, "forge")}
    weights: dict[str, Weights] = {}
    for number in range(rounds):
        turns = Turns(updates, hand, random.Random(number))
        weights = {"forge": ours(turns)}
        weights |= {name: _whole(own) for name, own in turns.weights.items()}
        for name, own in times.items():
            own += turns.times[name][WARM_UP : WARM_UP + updates]
    return {name: _of_all_ranks(own) for name, own in times.items()}, weights


def _mesh_rank(mesh: meshes.Mesh, updates: int, rounds: int) -> meshes.MeshCost:
    def plugins() -> list[Any]:
        cut = {f"*.{name}": kind for name, kind in meshes_by_hand.PLAN.items()}
        return meshes.strategies(mesh, PARTS, cut)

    logging.getLogger("forge").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.ERROR)
    hand = functools.partial(meshes_by_hand.mesh_by_hand, mesh=mesh)
    ours = functools.partial(with_forge, plugins, mesh=dict(mesh))
    times, weights = _taken_in_turns(hand, ours, updates, rounds)
    pairs = zip(weights["forge"], weights["by hand"], strict=True)
    most = torch.tensor(max(float((a - b).abs().max()) for a, b in pairs), dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    quiet = {name: _fastest_tenth([each.cpu for each in own]) for name, own in times.items()}
    ratios = {name: own / quiet["by hand"] for name, own in quiet.items()}
    return meshes.MeshCost(mesh, quiet["by hand"], ratios["forge"], ratios["by hand again"], float(most))


def _of_all_ranks(times: list[Times]) -> list[Times]:
    """Return the turns with the CPU time of all ranks: stages of a pipeline have different work."""
    cpu = torch.tensor([turn.cpu for turn in times], dtype=torch.float64)
    dist.all_reduce(cpu)
    return [turn._replace(cpu=sum_of_all) for turn, sum_of_all in zip(times, cpu.tolist(), strict=True)]


# -- task and data ----------------------------------------------------------------------------------------------------


class Turns(Batches):
    """forge's batches; before each of its updates every hand-written loop makes one."""

    def __init__(self, updates: int, hand: Callable[[Batches], Hand], order: random.Random):
        super().__init__(updates)
        self.order = order
        self.hands = {name: hand(Batches(updates)) for name in BY_HAND}
        self.times: dict[str, list[Times]] = {name: [] for name in (*BY_HAND, "forge")}
        self.weights: dict[str, Weights] = {}

    def __iter__(self) -> Iterator[Batch]:
        opened = None
        for index, batch in enumerate(super().__iter__()):
            if index % WINDOW == 0:
                if opened is not None:
                    self.times["forge"].append(opened.until_now())
                for name in self.order.sample(BY_HAND, len(BY_HAND)):
                    opened = Opened()
                    self.weights[name] = next(self.hands[name])
                    self.times[name].append(opened.until_now())
                opened = Opened()
            yield batch


class Opened:
    """A turn, started on all ranks at once."""

    def __init__(self) -> None:
        dist.barrier()
        self.watched = _watched()
        self.cpu, self.wall = time.thread_time(), time.perf_counter()

    def until_now(self) -> Times:
        wall, cpu = time.perf_counter() - self.wall, time.thread_time() - self.cpu
        return Times(wall * 1e3, cpu * 1e3, (_watched() - self.watched) * 1e3)


def _watched() -> float:
    """Return the CPU seconds of forge's heartbeat thread."""
    clocks = [
        time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident and "forge-heartbeat" in t.name
    ]
    return sum(map(time.clock_gettime, clocks))


def _to_the_end(hand: Hand) -> Weights:
    return _whole(collections.deque(hand, maxlen=1).pop())


STACKS: dict[str, Callable[[], list[Any]]] = {
    "ddp": lambda: [DDP()],
    "zero": lambda: [Zero()],
    "fsdp": lambda: [FSDP(min_size=0)],
    "context_parallel": lambda: [DDP(), ContextParallel()],
    "pipeline": lambda: [Pipeline(PARTS)],
    "pipeline_shard": lambda: [Pipeline(PARTS, stages=2, shard=True)],
}


class Task(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def training_step(self, batch: Batch) -> Tensor:
        return loss(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def with_forge(strategies: Callable[[], list[Any]], batches: Batches, mesh: dict[str, int] | None = None) -> Weights:
    plugins = [Accumulate(WINDOW), Clip(MAX_NORM), *strategies()]
    task = Task()
    kept: Weights = []

    @forge.on("boundary")
    def keep(trainer: forge.Trainer, step: forge.Step) -> None:
        if step.ends_epoch:
            kept.extend(_whole(task.parameters()))

    options: dict[str, Any] = {"max_epochs": 1, "run_dir": False, "device": "cpu", "mesh": mesh}
    forge.Trainer(plugins=[*plugins, keep], **options).fit(task, batches)
    return kept


def _whole(parameters: Iterable[Tensor]) -> Weights:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters if not p.is_meta]


# -- collectives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives and bytes per update of one rank."""

    collectives: float
    bytes: float


def _traffic(train: Callable[[Batches], Weights], names: tuple[str, ...]) -> Traffic:
    """Count as the difference of a longer and a shorter run, so that start and end cancel."""
    short, long = (_counted(train, updates, names) for updates in (2, 6))
    return Traffic((long.collectives - short.collectives) / 4, (long.bytes - short.bytes) / 4)


def _counted(train: Callable[[Batches], Weights], updates: int, names: tuple[str, ...]) -> Traffic:
    before = _collectives()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        train(Batches(updates))
    seen = [_bytes(event) for event in profiled.events() or () if event.name.startswith(names)]
    return Traffic(_collectives() - before, sum(seen))


def _collectives() -> int:
    """Return the collectives so far, over all groups but forge's own for its messages."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups if group.group_desc != "control")


def _bytes(event: Any) -> float:
    """Return the bytes of a collective, or 0 for forge's own messages of a few numbers."""
    numbers = max(map(_numbers, event.input_shapes), default=0)
    return 4.0 * numbers if numbers > FEW else 0.0


def _numbers(shape: Any) -> int:
    if not shape:
        return 0
    if isinstance(shape[0], (list, tuple)):
        return sum(_numbers(part) for part in shape)
    count = 1
    for length in shape:
        count *= length
    return count


# -- the table --------------------------------------------------------------------------------------------------------


def _row(
    strategy: str,
    name: str,
    times: dict[str, list[Times]],
    seen: dict[str, Traffic],
    weights: dict[str, Weights],
) -> Row:
    own, base = times[name], times["by hand"]
    everybody = [each for turns in times.values() for each in turns]
    return Row(
        strategy,
        name,
        statistics.median(each.wall for each in own),
        statistics.median(a.wall / b.wall for a, b in zip(own, base, strict=True)),
        _fastest_tenth([each.wall for each in own]) / _fastest_tenth([each.wall for each in base]),
        statistics.median(a.cpu / b.cpu for a, b in zip(own, base, strict=True)),
        _fastest_tenth([each.cpu for each in own]) / _fastest_tenth([each.cpu for each in base]),
        1e3 * sum(each.watch for each in everybody) / sum(each.wall for each in everybody),
        seen[name].collectives,
        seen[name].bytes / 1e6,
        _expected()[strategy] / 1e6,
        all(torch.equal(a, b) for a, b in zip(weights[name], weights["by hand"], strict=True)),
    )


def _expected() -> dict[str, float]:
    """Return the bytes per update of every strategy on rank 0, by formula."""
    network = make_network()
    every, blocks = (sum(p.nbytes for p in module.parameters()) for module in (network, network.blocks.layers))
    outside, head = every - blocks, sum(p.nbytes for p in network.head.parameters())
    hidden = BATCH * LENGTH * network.embed.weight[0].nbytes
    layers, stage = len(network.blocks.layers), blocks / 2 + outside
    return {
        "ddp": every,
        "zero": 2 * every,
        "fsdp": 2 * WINDOW * blocks + WINDOW * outside + every,
        "context_parallel": every + WINDOW * layers * (3 * 2 - 2) * 2 * hidden // 2,
        "pipeline": 2 * WINDOW * hidden + outside,
        "pipeline_shard": 2 * WINDOW * hidden / 2 + stage + (stage - head) + outside / 2,
    }


def _fastest_tenth(times: list[float]) -> float:
    fastest = sorted(times)
    return statistics.mean(fastest[: max(1, len(fastest) // 10)])


def _table(strategy: str, rows: list[Row], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"{strategy}: {WORLDS.get(strategy, 2)} ranks, {options.rounds} rounds of {options.updates} updates",
        caption=f"forge's watch: {rows[0].watch_ms_per_second:.2f} ms of CPU a second",
    )
    counted = ("collectives", "MB", "MB expected", "identical")
    for heading in ("", "ms/update", "ratio", "quiet", "CPU", "quiet CPU", *counted):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.contender,
            f"{row.ms:.2f}",
            f"{row.ratio:.3f}×",
            f"{row.quiet_ratio:.3f}×",
            f"{row.cpu_ratio:.3f}×",
            f"{row.quiet_cpu_ratio:.3f}×",
            f"{row.collectives:g}",
            f"{row.megabytes:.2f}",
            f"{row.expected_megabytes:.2f}",
            "yes" if row.identical else "no",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    parser.add_argument("--strategies", type=some_of(LOOPS), default=list(LOOPS), help=f"of {','.join(LOOPS)}")
    parser.add_argument("--gpu", action="store_true", help="one rank over NCCL instead, on this machine's GPU")
    parser.add_argument("--meshes", action="store_true", help="meshes and models of others instead: differences, bytes")
    parser.add_argument("--first", type=int, default=None, help="with --meshes, only so many of them")
    parser.add_argument("--write", action="store_true", help="with --meshes, write the table into the documentation")
    parser.add_argument("--updates", type=int, default=40, help="updates timed in each round (default 40)")
    parser.add_argument(
        "--rounds", type=int, default=10, help="runs of forge, each with its loops by hand (default 10)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
