"""What forge's ddp and fsdp cost over torch's own in a loop written by hand: two ranks, the same work.

    python -m benchmarks.scale                                # both strategies, about 4 minutes
    python -m benchmarks.scale --strategies ddp --rounds 30
    python -m benchmarks.scale --json > scale.jsonl           # one JSON object a line: the machine, then the rows
    python -m benchmarks.scale --updates 10 --rounds 1        # smoke test
    python -m benchmarks.scale --gpu --rounds 3               # one rank over NCCL: what a strategy costs on one GPU

Two processes over gloo train a transformer, accumulating two micro-batches and clipping: by hand, by hand once more
(what differs is noise), and with forge; in turn, in one process each, from the same weights. The time is wall time from
the batch that opens an update to the one that opens the next, on rank 0, because waiting for the other rank is part of
it. A round's figure is the median over its updates, and the table shows the median over rounds of each round's ratio to
the loop by hand; "quiet" compares the fastest rounds.

With `--gpu` one rank trains a GPT of 12 layers, width 768 and batch 32 in bf16, compiled, without a strategy, with ddp
and with fsdp, in turn.

Collectives are counted by torch's own sequence number of the process group. Bytes are those that one rank hands to
torch for gradients and parameters in an update, by torch's profiler, beside what the formula expects: DDP all-reduces
every gradient once (p); FSDP2 gathers a block's parameters for forward and again for backward in every micro-batch
(2 m b), those of no block once (m r), and scatters all gradients once (p = b + r); m micro-batches make an update.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

import forge
from benchmarks import levers, machine
from benchmarks.cases import Batch, Transformer, loss_of
from benchmarks.command_line import some_of
from forge_plugins import DDP, FSDP, Accumulate, Clip

WORLD, WINDOW, MAX_NORM, BATCH = 2, 2, 1.0, 32
WARM_UP = 5
STRATEGIES = ("ddp", "fsdp")
COLLECTIVES = {"ddp": ("gloo:all_reduce",), "fsdp": ("c10d::_allgather_base", "c10d::_reduce_scatter_base")}
"""What torch's profiler calls them, where it knows their sizes; gloo scatters by reducing, so that is not counted."""
FEW = 64

Weights = list[Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """A contender's line of the table."""

    strategy: str
    contender: str
    ms: float
    ratio: float
    quiet_ratio: float
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
    """Milliseconds per update of one rank on one GPU, the median over rounds, and its ratio to no strategy."""
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
    """All contenders on two ranks."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    multiprocessing.spawn(_rank, (port, strategy, updates, rounds, found), nprocs=WORLD)
    return found.get()


def _rank(rank: int, port: int, strategy: str, updates: int, rounds: int, found: Any) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hand = ddp_by_hand if strategy == "ddp" else fsdp_by_hand
    contenders: dict[str, Callable[[Batches], Weights]] = {
        "by hand": hand,
        "by hand again": hand,
        "forge": lambda batches: with_forge(strategy, batches),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    weights: dict[str, Weights] = {}
    seen = {name: _traffic(train, COLLECTIVES[strategy]) for name, train in contenders.items()}
    for _ in range(rounds):
        for name, train in contenders.items():
            batches = Batches(updates)
            weights[name] = train(batches)
            times[name].append(statistics.median(batches.each()))
    if rank == 0:
        found.put([_row(strategy, name, times, seen, weights) for name in contenders])
    with suppress(RuntimeError):
        dist.destroy_process_group()


# -- what is trained --------------------------------------------------------------------------------------------------


class Batches:
    """Global batches in memory, with stamps of the time at which each update's first one is asked for."""

    def __init__(self, updates: int):
        self.updates = WARM_UP + updates + 1
        self.stamps: list[float] = []
        generator = torch.Generator().manual_seed(1)
        tokens = [torch.randint(64, (2, BATCH, 32), generator=generator) for _ in range(8)]
        self.pool: list[Batch] = [(x, y) for x, y in tokens]

    def __len__(self) -> int:
        return self.updates * WINDOW

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            if index % WINDOW == 0:
                self.stamps.append(time.perf_counter())
            yield self.pool[index % len(self.pool)]

    def each(self) -> list[float]:
        """Milliseconds of each update after the warm-up."""
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.stamps[WARM_UP:])]


def _loss(network: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return loss_of(network, (x, y.flatten()))


def _network() -> Transformer:
    torch.manual_seed(0)
    return Transformer(width=128)


def _share(batch: Batch) -> Batch:
    rank, size = dist.get_rank(), BATCH // WORLD
    return batch[0][rank * size : (rank + 1) * size], batch[1][rank * size : (rank + 1) * size]


def ddp_by_hand(batches: Batches) -> Weights:
    network = _network()
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)

    def exchange(last: bool) -> None:
        model.require_backward_grad_sync = last  # what `no_sync` sets

    return _train(model, network, batches, exchange)


def fsdp_by_hand(batches: Batches) -> Weights:
    network = _network()
    for block in network.blocks.layers:
        fully_shard(block)
    model: Any = fully_shard(network)

    def exchange(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)

    return _train(model, network, batches, exchange)


def _train(model: nn.Module, network: nn.Module, batches: Batches, exchange: Callable[[bool], None]) -> Weights:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for index, batch in enumerate(batches, 1):
        last = index % WINDOW == 0
        exchange(last)
        (_loss(model, _share(batch)) / WINDOW).backward()
        if last:
            clip_grad_norm_(network.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return _whole(network)


class Task(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = _network()

    def training_step(self, batch: Batch) -> Tensor:
        return _loss(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def with_forge(strategy: str, batches: Batches) -> Weights:
    plugins = [Accumulate(WINDOW), Clip(MAX_NORM), DDP() if strategy == "ddp" else FSDP(min_size=0)]
    task = Task()
    kept: Weights = []

    @forge.on("boundary")
    def keep(trainer: forge.Trainer, step: forge.Step) -> None:
        if step.ends_epoch:
            kept.extend(_whole(task))

    options: dict[str, Any] = {"max_epochs": 1, "run_dir": False, "device": "cpu"}
    forge.Trainer(plugins=[*plugins, keep], **options).fit(task, batches)
    return kept


def _whole(network: nn.Module) -> Weights:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in network.parameters()]


# -- what is counted --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Per update, on one rank."""

    collectives: float
    bytes: float


def _traffic(train: Callable[[Batches], Weights], names: tuple[str, ...]) -> Traffic:
    """The difference between a longer and a shorter run: what both do once, at their beginning and end, cancels."""
    short, long = (_counted(train, updates, names) for updates in (2, 6))
    return Traffic((long.collectives - short.collectives) / 4, (long.bytes - short.bytes) / 4)


def _counted(train: Callable[[Batches], Weights], updates: int, names: tuple[str, ...]) -> Traffic:
    group: Any = dist.distributed_c10d._get_default_group()
    before = group._get_sequence_number_for_group()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        train(Batches(updates))
    seen = [_bytes(event) for event in profiled.events() or () if event.name.startswith(names)]
    return Traffic(group._get_sequence_number_for_group() - before, sum(seen))


def _bytes(event: Any) -> float:
    """What a collective of gradients or parameters handles; forge's own messages are a few numbers each."""
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
    strategy: str, name: str, times: dict[str, list[float]], seen: dict[str, Traffic], weights: dict[str, Weights]
) -> Row:
    own, base = times[name], times["by hand"]
    network = _network()
    every, blocks = (sum(p.nbytes for p in module.parameters()) for module in (network, network.blocks.layers))
    expected = every if strategy == "ddp" else 2 * WINDOW * blocks + WINDOW * (every - blocks) + every
    return Row(
        strategy,
        name,
        statistics.median(own),
        statistics.median(a / b for a, b in zip(own, base, strict=True)),
        min(own) / min(base),
        seen[name].collectives,
        seen[name].bytes / 1e6,
        expected / 1e6,
        all(torch.equal(a, b) for a, b in zip(weights[name], weights["by hand"], strict=True)),
    )


def _table(strategy: str, rows: list[Row], options: argparse.Namespace) -> Table:
    table = Table(title=f"{strategy}: {WORLD} ranks over gloo, {options.rounds} rounds of {options.updates} updates")
    for heading in ("", "ms/update", "ratio", "quiet ratio", "collectives", "MB", "MB expected", "identical"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.contender,
            f"{row.ms:.2f}",
            f"{row.ratio:.3f}×",
            f"{row.quiet_ratio:.3f}×",
            f"{row.collectives:g}",
            f"{row.megabytes:.2f}",
            f"{row.expected_megabytes:.2f}",
            "yes" if row.identical else "no",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    parser.add_argument("--strategies", type=some_of(STRATEGIES), default=list(STRATEGIES), help="of ddp,fsdp")
    parser.add_argument("--gpu", action="store_true", help="one rank over NCCL instead, on this machine's GPU")
    parser.add_argument("--updates", type=int, default=40, help="updates timed in each run (default 40)")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each contender (default 15)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
