"""Ranking: predict every layout, keep what fits, and say why the best three are best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.planning.advice import COMFORT
from forge_cluster.planning.failures import ExpectedGoodput, goodput
from forge_cluster.planning.hardware import Cluster
from forge_cluster.planning.layouts import Layout, layouts
from forge_cluster.planning.memory import memory_of
from forge_cluster.planning.stragglers import slowdown
from forge_cluster.planning.timing import Model, UpdateTiming
from forge_cluster.planning.workload import Workload

SHOWN, BEST, FINALISTS = 12, 3, 24
WORTH = 0.01
"""Share of an update's time that an axis of the mesh must save, or a simpler layout is better."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One layout with its memory and time."""

    layout: Layout
    memory: float
    timing: UpdateTiming
    fits: bool

    @property
    def seconds(self) -> float:
        return self.timing.total


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All that was found out about a task on a cluster."""

    cluster: Cluster
    batch: int
    considered: int
    rows: list[Prediction]
    "The best layout of every kind, fastest first; those that do not fit after them."
    best: list[Prediction]
    reasons: list[str]
    mfu: list[float]
    goodput: ExpectedGoodput | None
    straggling: float
    "Factor of an update's time because all wait for the slowest."
    notes: list[str]


def plan_cluster(work: Workload, cluster: Cluster) -> ClusterPlan:
    """Predict every layout of a task on a cluster."""
    model = Model(work, cluster).calibrated()
    limit = COMFORT * cluster.memory
    found = []
    for layout in layouts(work, cluster):
        memory = memory_of(work, layout)
        found.append(Prediction(layout, memory, model.time(layout), memory <= limit))
    fitting = sorted((row for row in found if row.fits), key=_order)
    finalists = [_simulated(model, row) for row in _kinds(fitting)[:FINALISTS]]
    rows = sorted(finalists, key=_order)
    best = rows[:BEST]
    others = sorted((row for row in found if not row.fits), key=lambda row: row.memory)
    shown = rows[:SHOWN]
    shown += _kinds([row for row in others if _kind(row) not in {_kind(r) for r in rows}])[: SHOWN - len(shown) or 2]
    best_goodput = None
    if best:
        state = work.at(work.base, 1)
        per_gpu = (state["parameters"] + state["optimizer"]) / cluster.gpus
        save = max(1.0, per_gpu / cluster.host_copy)
        best_goodput = goodput(cluster.gpus, cluster.failures, save, cluster.restart)
    return ClusterPlan(
        cluster=cluster,
        batch=work.batch,
        considered=len(found),
        rows=shown,
        best=best,
        reasons=[_why(row, rank, best, found, cluster) for rank, row in enumerate(best)],
        mfu=[model.mfu(row.timing, cluster.gpus) for row in best],
        goodput=best_goodput,
        straggling=slowdown(cluster.gpus, cluster.jitter),
        notes=_notes(work, cluster, model, found),
    )


def _simulated(model: Model, row: Prediction) -> Prediction:
    if row.layout.pipeline == 1:
        return row
    return Prediction(row.layout, row.memory, model.time(row.layout, simulated=True), row.fits)


def _order(row: Prediction) -> tuple[float, ...]:
    """Fastest first, but every further axis of the mesh must pay for itself with 1 % of the time."""
    layout = row.layout
    axes = sum(size > 1 for size in (layout.replicate, layout.tensor, layout.context, layout.pipeline))
    return row.seconds * (1 + WORTH * axes), layout.data != "ddp", layout.micros, row.memory


def _kind(row: Prediction) -> tuple[object, ...]:
    layout = row.layout
    return layout.data, layout.replicate > 1, layout.tensor, layout.context, layout.pipeline, layout.variant


def _kinds(rows: Sequence[Prediction]) -> list[Prediction]:
    """Return the first of every kind."""
    first: dict[object, Prediction] = {}
    for row in rows:
        first.setdefault(_kind(row), row)
    return list(first.values())


def _why(row: Prediction, rank: int, best: list[Prediction], found: list[Prediction], cluster: Cluster) -> str:
    time, share = row.timing, row.memory / cluster.memory
    parts = [f"{time.compute / time.total:.0%} of the update computes, memory is {share:.0%} full"]
    if time.exposed > 0.01 * time.total:
        parts.append(f"{time.exposed / time.total:.0%} waits for communication")
    if time.bubble > 0.01 * time.total:
        parts.append(f"{time.bubble / time.total:.0%} is the pipeline's bubble")
    if rank:
        parts.append(f"{row.seconds / best[0].seconds - 1:.1%} slower than the first")
    simpler = [
        other
        for other in found
        if not other.fits and other.layout.data == "ddp" and other.layout.gpus == other.layout.data_ranks
    ]
    if not rank and row.layout.data != "ddp" and simpler:
        least = min(simpler, key=lambda other: other.memory)
        parts.append(f"ddp would need {least.memory / 2**30:.0f} GiB")
    return "; ".join(parts)


def _notes(work: Workload, cluster: Cluster, model: Model, found: list[Prediction]) -> list[str]:
    notes = []
    if not found:
        notes.append(
            f"A batch of {work.batch} cannot be divided over {cluster.gpus} GPUs: choose a multiple, or fewer GPUs."
        )
    elif not any(row.fits for row in found):
        least = min(found, key=lambda row: row.memory)
        notes.append(
            f"Nothing fits: the least is {least.layout.label} with {least.memory / 2**30:.1f} GiB. "
            "Use more GPUs, shorter samples or a smaller model."
        )
    if cluster.measured is None:
        notes.append(
            "Times are by data sheet. To scale them to a measured step: --calibrate on such a GPU, or `measured` in "
            "the cluster's file."
        )
    else:
        notes.append(f"Computation is scaled by {model.scale:.2f}, to the step that was measured.")
    if not work.blocks:
        notes.append("The task has no repeated blocks, so pipelines, tensor parallelism and remat are left out.")
    elif not work.heads:
        notes.append("The task has no attention that torch computes, so tensor and context parallelism are left out.")
    return notes
