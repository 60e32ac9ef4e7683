"""Ranking: predict every layout, keep what fits, and say why the best three are best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from forge.planning.advice import COMFORT
from forge_cluster.planning.combining import Combining
from forge_cluster.planning.failures import ExpectedGoodput, goodput
from forge_cluster.planning.hardware import Cluster
from forge_cluster.planning.layouts import Layout, layouts
from forge_cluster.planning.memory import memory_of
from forge_cluster.planning.published import PublishedRow, nearest_rows, published_rows, typical_error
from forge_cluster.planning.stragglers import slowdown
from forge_cluster.planning.timing import Model, UpdateTiming
from forge_cluster.planning.workload import Workload

SHOWN, BEST, FINALISTS = 12, 3, 24


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
    error: float
    "The model's own, by published rows: differences below it are none."
    length: int | None
    "Positions of a sample, of a language model."
    compiled: bool
    other: list[float] | None
    "Seconds of the best ones if the task is compiled where it is not now, or is not where it is."
    near: list[PublishedRow]
    "The published rows most like this plan."


def plan_cluster(work: Workload, cluster: Cluster) -> ClusterPlan:
    """Predict every layout of a task on a cluster."""
    model = Model(work, cluster).calibrated()
    limit = COMFORT * cluster.memory
    found = []
    combining = Combining(work.recipe)
    for layout in layouts(work, cluster, combining.accepts):
        memory = memory_of(work, layout)
        found.append(Prediction(layout, memory, model.time(layout), memory <= limit))
    error = typical_error(published_rows())
    order = partial(_order, worth=error)
    fitting = sorted((row for row in found if row.fits), key=order)
    finalists = [_simulated(model, row) for row in _kinds(fitting)[:FINALISTS]]
    rows = sorted(finalists, key=order)
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
        reasons=[_why(row, rank, best, found, cluster, error) for rank, row in enumerate(best)],
        mfu=[model.mfu(row.timing, cluster.gpus) for row in best],
        goodput=best_goodput,
        straggling=slowdown(cluster.gpus, cluster.jitter),
        notes=[*_notes(work, cluster, model, found), *(f"Left out: {why}" for why in combining.left_out)],
        error=error,
        length=work.positions if work.heads else None,
        compiled=work.compiled,
        other=_otherwise(work, cluster, best),
        near=_near(work, cluster),
    )


def _otherwise(work: Workload, cluster: Cluster, best: list[Prediction]) -> list[float] | None:
    """Return the seconds of layouts with or without compile, as the task is not; a measured step tells of one alone."""
    if cluster.measured is not None:
        return None
    model = Model(replace(work, compiled=not work.compiled), cluster)
    return [model.time(row.layout, simulated=True).total for row in best]


def _near(work: Workload, cluster: Cluster) -> list[PublishedRow]:
    """Return published rows like the task, if it is a language model; a product with a weight is 2 operations."""
    if not work.positions or not work.heads:
        return []
    weights = work.at(work.base, 1)["matmul forward"] / 2 / work.positions
    return nearest_rows(weights, work.positions, cluster.gpus, cluster.gpu, work.compiled)


def _simulated(model: Model, row: Prediction) -> Prediction:
    if row.layout.pipeline == 1:
        return row
    return Prediction(row.layout, row.memory, model.time(row.layout, simulated=True), row.fits)


def _order(row: Prediction, worth: float) -> tuple[float, ...]:
    """Fastest first, but every further axis of the mesh must save more time than the model may be off by."""
    layout = row.layout
    return row.seconds * (1 + worth * _axes(layout)), layout.data != "ddp", layout.micros, row.memory


def _axes(layout: Layout) -> int:
    return sum(size > 1 for size in (layout.replicate, layout.tensor, layout.context, layout.pipeline))


def _kind(row: Prediction) -> tuple[object, ...]:
    layout = row.layout
    return layout.data, layout.replicate > 1, layout.tensor, layout.context, layout.pipeline, layout.variant


def _kinds(rows: Sequence[Prediction]) -> list[Prediction]:
    """Return the first of every kind."""
    first: dict[object, Prediction] = {}
    for row in rows:
        first.setdefault(_kind(row), row)
    return list(first.values())


def _why(
    row: Prediction, rank: int, best: list[Prediction], found: list[Prediction], cluster: Cluster, error: float
) -> str:
    time, share = row.timing, row.memory / cluster.memory
    parts = [f"{time.compute / time.total:.0%} of the update computes, memory is {share:.0%} full"]
    if time.exposed > 0.01 * time.total:
        parts.append(f"{time.exposed / time.total:.0%} waits for communication")
    if time.bubble > 0.01 * time.total:
        parts.append(f"{time.bubble / time.total:.0%} is the pipeline's bubble")
    if rank:
        parts.append(_beside(row, best[0], error))
    simpler = [
        other
        for other in found
        if not other.fits and other.layout.data == "ddp" and other.layout.gpus == other.layout.data_ranks
    ]
    if not rank and row.layout.data != "ddp" and simpler:
        least = min(simpler, key=lambda other: other.memory)
        parts.append(f"ddp would need {least.memory / 2**30:.0f} GiB")
    return "; ".join(parts)


def _beside(row: Prediction, first: Prediction, error: float) -> str:
    """Compare with the first; what differs by less than the model's error is equal."""
    longer = row.seconds / first.seconds - 1
    if abs(longer) <= error:
        return f"as fast as the first, within the model's error of {error:.0%}"
    if longer > 0:
        return f"{longer:.0%} slower than the first"
    return f"{-longer:.0%} faster than the first, with {_axes(row.layout) - _axes(first.layout)} more axes of the mesh"


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
            "Times are by data sheet and the shares below. To scale them to a measured step: --calibrate on such a "
            "GPU, or `measured` in the cluster's file."
        )
    else:
        notes.append(f"Computation is scaled by {model.scale:.2f}, to the step that was measured.")
    if not work.blocks:
        notes.append("The task has no repeated blocks, so pipelines, tensor parallelism and remat are left out.")
    elif not work.heads:
        notes.append("The task has no attention that torch computes, so tensor and context parallelism are left out.")
    return notes
