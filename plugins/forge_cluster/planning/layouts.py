"""Layouts: every way to divide a task over the GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from forge_cluster.planning.hardware import Cluster
from forge_cluster.planning.pipeline_events import INTERLEAVED, SCHEDULES
from forge_cluster.planning.workload import Variant, Workload

CHUNKS = 2
"""Stages of a rank in interleaved schedules."""
DEEPEST, LONGEST = 64, 64
"""The most ranks of a pipeline, and of one sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to train: ranks are numbered tensor first, then context, data and pipeline."""

    data: str
    "single, ddp, zero1, zero2 or fsdp."
    variant: Variant
    shard: int = 1
    "Ranks of data parallelism that divide state (fsdp), or all of them (ddp, zero)."
    replicate: int = 1
    "Groups of such ranks with all state each: hybrid sharding."
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    schedule: str | None = None
    micros: int = 1
    "Micro-batches of a rank in an update: of the pipeline, or accumulated."
    sequence: bool = False
    "Whether tensor parallelism divides norms and what blocks hand on by positions, as its style `sequence` does."
    split_loss: bool = False
    "Whether tensor parallelism divides the loss by classes; otherwise every rank has all logits."
    scatters: bool = False
    "Whether fsdp scatters gradients with every micro-batch (`reduce=micro`), so that a window sums shards of them."
    torchtitan: bool = False
    """Whether pipelines are torchtitan's: only the first stage has the embedding and only the last the head, the ranks
    of a stage are neighbours, and gradients are exchanged during the backward pass. In forge's every stage has what is
    outside of blocks, the ranks of a pipeline are neighbours, and gradients are exchanged after it."""

    @property
    def data_ranks(self) -> int:
        return self.shard * self.replicate

    @property
    def gpus(self) -> int:
        return self.data_ranks * self.tensor * self.context * self.pipeline

    @property
    def chunks(self) -> int:
        return CHUNKS if self.schedule in INTERLEAVED else 1

    @property
    def divided(self) -> dict[str, int]:
        """Ranks that divide one sample, by the plugin that divides it."""
        return {"tensor_parallel": self.tensor, "context_parallel": self.context}

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of the mesh with more than one rank."""
        copies, parts = (self.replicate, self.shard) if self.data == "fsdp" else (self.data_ranks, 1)
        sizes = {"data": copies, "shard": parts, "pipe": self.pipeline, "context": self.context, "tensor": self.tensor}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def holders(self) -> int:
        """Ranks that divide state. Those with slices of the same sequences do too: gradients are averaged over both."""
        return 1 if self.data in ("single", "ddp") else self.shard * self.context

    @property
    def shards_stages(self) -> bool:
        """Whether FSDP2 divides the stages of a pipeline among the pipelines, as `pipeline.shard` does."""
        return self.data == "fsdp" and self.pipeline > 1 and not self.torchtitan

    @property
    def label(self) -> str:
        parts = [] if self.data == "single" else [f"{self.data} {self.shard}"]
        if self.replicate > 1:
            parts = [f"{self.data} {self.shard}×{self.replicate}"]
        parts = [f"{part} scattering" if self.scatters else part for part in parts]
        parts += [f"{short} {size}" for short, size in (("tp", self.tensor), ("cp", self.context)) if size > 1]
        if self.pipeline > 1:
            parts.append(f"pp {self.pipeline} {self.schedule}")
        return " + ".join(parts) or "single"

    @property
    def levers(self) -> str:
        names = [] if self.variant.precision == "fp32" else [self.variant.precision]
        return " + ".join([*names, *(["remat"] if self.variant.remat else [])])


def layouts(work: Workload, cluster: Cluster, accepts: Callable[[Layout], bool]) -> Iterator[Layout]:
    """Yield every layout that is accepted, uses all GPUs, and gives each a whole number of samples."""
    gpus = cluster.gpus
    for tensor in _tensor_sizes(work, cluster):
        for context in _context_sizes(work, gpus // tensor):
            for pipeline in _pipeline_sizes(work, gpus // (tensor * context)):
                ranks = gpus // (tensor * context * pipeline)
                if ranks > work.batch or work.batch % ranks:
                    continue
                share = work.batch // ranks
                for data, shard, replicate in _data(ranks, cluster, alone=gpus == 1):
                    if pipeline > 1 and data == "fsdp" and shard == 1:
                        continue  # one pipeline divides no stage: the same as ddp
                    for variant in work.lines:
                        casts = data == "fsdp" and pipeline == 1
                        if (variant.precision == "bf16") != casts and variant.short:
                            continue  # fsdp casts what it gathers, the others run under amp
                        for schedule, micros in _schedules(pipeline, share):
                            parts = (shard, replicate, tensor, context, pipeline, schedule, micros)
                            layout = Layout(data, variant, *parts)
                            if accepts(layout):
                                yield layout
                                if data == "fsdp" and pipeline == 1 < micros:
                                    yield replace(layout, scatters=True)


@cache
def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _tensor_sizes(work: Workload, cluster: Cluster) -> list[int]:
    """Inside a node, where links are fast, and only if it divides the heads."""
    if not work.heads or not work.blocks or cluster.gpus == 1:
        return [1]
    return [n for n in _divisors(cluster.gpus_per_node) if work.heads % n == 0]


def _context_sizes(work: Workload, ranks: int) -> list[int]:
    if not work.positions or not work.heads:
        return [1]
    return [n for n in _divisors(ranks) if n <= LONGEST and work.positions % (2 * n) == 0]


def _pipeline_sizes(work: Workload, ranks: int) -> list[int]:
    return [n for n in _divisors(ranks) if n == 1 or n <= min(DEEPEST, work.blocks)]


def _data(ranks: int, cluster: Cluster, alone: bool) -> Iterator[tuple[str, int, int]]:
    if alone:
        yield "single", 1, 1
        return
    yield "fsdp", ranks, 1
    yield "ddp", ranks, 1
    if ranks > 1:
        yield "zero1", ranks, 1
        yield "zero2", ranks, 1
    for replicate in _divisors(ranks):
        if 1 < replicate < ranks and ranks // replicate <= 8 * cluster.gpus_per_node:
            yield "fsdp", ranks // replicate, replicate


def _schedules(pipeline: int, share: int) -> Iterator[tuple[str | None, int]]:
    if pipeline == 1:
        yield from ((None, micros) for micros in (1, 2, 4, 8, 16) if share % micros == 0)
        return
    for micros in _divisors(share):
        if micros < min(pipeline, share) or micros > 8 * pipeline:
            continue
        for schedule in SCHEDULES:
            if schedule != "GPipe" and micros < pipeline:
                continue  # torch refuses it
            if schedule not in INTERLEAVED or micros % pipeline == 0:
                yield schedule, micros
