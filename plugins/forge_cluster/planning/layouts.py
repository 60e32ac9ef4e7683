"""Layouts: the ways to divide an update among the GPUs of a cluster that a plan compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_cluster.planning.hardware import Cluster
    from forge_cluster.planning.step import UpdateCost

DEEPEST = 8
"""The most stages that are planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks divide what, by the axes of the mesh; `data` beside `shard` is hybrid sharding."""

    data: int = 1
    shard: int = 1
    pipe: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    zero: int = 0
    "ZeRO's stage, 1 or 2; 0 without."
    micros: int = 1
    "Micro-batches of a pipeline."
    schedule: str = "1f1b"

    @property
    def mesh(self) -> dict[str, int]:
        """Return the axes with more than one rank, outermost first."""
        return {axis: size for axis, size in list(asdict(self).items())[:6] if size > 1}

    @property
    def samplers(self) -> int:
        """Return the ranks that have different samples."""
        return self.data * self.shard * self.expert

    @property
    def holders(self) -> int:
        """Return the ranks that divide weights under fsdp: all whose gradients are averaged, but for `data`."""
        return self.shard * self.context * self.expert if self.shard > 1 else 1

    def samples(self, batch: int) -> float:
        """Return the samples of a micro-batch on one rank."""
        return batch / self.samplers / self.micros

    @property
    def plugins(self) -> dict[str, dict[str, Any]]:
        """Return the plugins that train so, with their options."""
        found: dict[str, dict[str, Any]] = {"zero": {"stage": self.zero}} if self.zero else {}
        if self.pipe > 1:
            found["pipeline"] = {"microbatches": self.micros, "schedule": self.schedule}
        elif self.mesh and not self.zero:
            found["fsdp" if self.shard > 1 else "ddp"] = {}
        dividing = {"context_parallel": self.context, "expert_parallel": self.expert, "tensor_parallel": self.tensor}
        return found | {name: {} for name, size in dividing.items() if size > 1}


def layouts(step: UpdateCost, cluster: Cluster) -> Iterator[Layout]:
    """Yield the layouts that divide the batch evenly; what divides a layer stays inside a node."""
    gpus, node, stages = cluster.gpus, cluster.gpus_per_node, min(DEEPEST, cluster.gpus_per_node)
    every = [Layout(data=gpus)]
    if gpus > 1:
        every += [Layout(data=gpus, zero=1), Layout(data=gpus, zero=2), Layout(shard=gpus)]
    if gpus > node > 1:
        every.append(Layout(data=gpus // node, shard=node))
    if step.blocks and gpus > node > 1:
        every += [Layout(shard=gpus // node, tensor=node), Layout(shard=gpus // node, context=node)]
    if step.experts and node > 1:
        every += [Layout(data=gpus // node, expert=node), Layout(shard=gpus // node, expert=node)]
    if step.blocks >= stages > 1:
        every += [Layout(data=gpus // stages, pipe=stages), Layout(shard=gpus // stages, pipe=stages)]
    for layout in dict.fromkeys(every):
        share = step.batch // layout.samplers
        if step.batch % layout.samplers == 0 and layout.pipe == 1:
            yield layout
        elif step.batch % layout.samplers == 0 and share % layout.pipe == 0:
            yield replace(layout, micros=max(n for n in range(1, 4 * stages + 1) if share % n == 0))
