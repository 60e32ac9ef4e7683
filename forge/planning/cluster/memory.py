"""Memory of a layout on its fullest GPU, from the counted quantities of one device."""

from __future__ import annotations

import math

from forge.planning.cluster.layouts import Layout
from forge.planning.cluster.workload import Workload
from forge.planning.footprint import WORKSPACE
from forge.planning.strategies import PREFETCHED

DIVIDED = 24 / 34
"""Share of a transformer block's activations that tensor parallelism divides (Korthikanti et al., 2022)."""


def memory_of(work: Workload, layout: Layout) -> float:
    """Return the bytes that torch allocates on the fullest GPU of a layout."""
    first = _stage(work, layout, 0)
    return first if layout.pipeline == 1 else max(first, _stage(work, layout, layout.pipeline - 1))


def _stage(work: Workload, layout: Layout, stage: int) -> float:
    """Return the bytes on the GPUs of a stage of the pipeline; the first holds most activations, the last the head."""
    _p, t = layout.pipeline, layout.tensor
    state = work.at(work.base, 1)
    samples = work.batch / layout.data_ranks / layout.micros
    q = work.at(layout.variant, samples)
    weights = state["parameters"] - state["buffers"]
    here = _share_of_weights(work, layout) / t
    sharded = layout.shard if layout.data == "fsdp" else 1
    parameters = weights * here / sharded + state["buffers"]
    optimizer = state["optimizer"] * here / (sharded if layout.data == "fsdp" else _zero(layout, 1))
    gradients = state["gradients"] * here
    rests = _activations(work, layout, q, stage)
    if layout.data == "fsdp":
        return parameters + optimizer + _fsdp(work, layout, state, q, gradients, rests) + WORKSPACE
    kept = gradients / _zero(layout, 2)
    if layout.data == "single":
        moments = [rests[phase] + q[f"held {phase}"] * here for phase in ("forward", "backward")]
        moments.append(q["rest optimizer"] * here + q["held optimizer"] * here)
    else:
        moments = [rests["forward"] + kept, rests["backward"] + gradients, q["rest optimizer"] * here + kept]
    return parameters + optimizer + max(moments) + WORKSPACE


def _fsdp(
    work: Workload, layout: Layout, state: dict[str, float], q: dict[str, float], gradients: float, rests: dict
) -> float:
    """Return what fsdp holds beside its shards at the worst moment: gathered blocks, gradients, activations."""
    t, p = layout.tensor, layout.pipeline
    gathered = 0.5 if layout.variant.precision == "bf16" else 1.0
    outside = work.outside if p == 1 else max(work.largest_outside, work.outside - work.largest_outside)
    if p == 1:
        units = outside + PREFETCHED * work.block
    else:  # kept from the first micro-batch to the last
        units = outside + work.block * math.ceil(work.blocks / p)
    # a gradient is reduced in the type of the parameters, whole
    whole = gathered * units + max(work.block, outside)
    summed = gradients if layout.micros > 1 else 0.0  # whole until the last micro-batch of a window
    share = gradients / layout.shard
    held = {phase: state[f"held {phase}"] / max(1.0, state["gradients"]) for phase in ("forward", "backward")}
    computing = max(whole / t + rests[phase] + max(summed, share * held[phase]) for phase in ("forward", "backward"))
    stepping = share + state["rest optimizer"] * _share_of_weights(work, layout) / t / layout.shard
    return max(computing, stepping)


def _zero(layout: Layout, stage: int) -> int:
    """Return the ranks that divide the optimizer's state (stage 1) or the gradients (stage 2)."""
    return layout.shard if layout.data in {1: ("zero1", "zero2"), 2: ("zero2",)}[stage] else 1


def _share_of_weights(work: Workload, layout: Layout) -> float:
    """Return the share of all parameters that the fullest stage has."""
    p = layout.pipeline
    if p == 1:
        return 1.0
    blocks = work.blocks * work.block
    outside = max(work.largest_outside, work.outside - work.largest_outside)
    return (work.block * math.ceil(work.blocks / p) + outside) / max(1.0, blocks + work.outside)


def _activations(work: Workload, layout: Layout, q: dict[str, float], stage: int) -> dict[str, float]:
    """Return what forward and backward hold beside state, on one stage."""
    p, t, c = layout.pipeline, layout.tensor, layout.context
    fixed = work.lines[layout.variant][0]["block activations"]  # casts of weights: tensor parallelism divides them
    blocks = max(0.0, q["block activations"] - max(0.0, fixed)) / c * (1 - DIVIDED + DIVIDED / t)
    blocks += max(0.0, fixed) / t
    found = {}
    for phase in ("forward", "backward"):
        others = max(0.0, q[f"rest {phase}"] - q["block activations"]) / c
        if t > 1:
            others *= 1 - DIVIDED + DIVIDED / t
        if p == 1:
            found[phase] = blocks + others
        else:
            has_head = stage == p - 1
            found[phase] = blocks / p * in_flight(layout, stage) + (others if has_head else others / 4)
    return found


def in_flight(layout: Layout, stage: int) -> float:
    """Return how many micro-batches' activations a rank of the pipeline holds at most."""
    p, m, v = layout.pipeline, layout.micros, layout.chunks
    if layout.schedule == "GPipe":
        return m
    if layout.schedule == "1F1B":
        return min(m, p - stage)
    chunks = 2 * (p - stage - 1) + (v - 1) * p + 1
    if layout.schedule == "InterleavedZeroBubble":
        chunks += p  # gradients of weights that wait hold their inputs
    return min(m * v, chunks) / v
