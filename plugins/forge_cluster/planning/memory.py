"""Memory of a layout on its fullest GPU, from the counted quantities of one device.

`memory_of` is what torch allocates at the worst moment. `reserved_of` is what its allocator has taken from the device
by then, as `torch.cuda.max_memory_reserved` reports; it is more, for the two reasons in `_fsdp` and `_hole`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from forge.planning.footprint import WORKSPACE
from forge.planning.strategy_memory import PREFETCHED
from forge_cluster.planning.layouts import Layout
from forge_cluster.planning.workload import Workload

DIVIDED = 24 / 34
"""Share of a transformer block's activations that tensor parallelism divides (Korthikanti et al., 2022); with norms by
positions it divides all of them."""
KEPT_WHOLE = 2
"""With norms by positions: what a block keeps whole beside its divided activations, as torch does not gather it again:
the inputs of attention and of the MLP."""
PASSING_WHOLE = 4
"""With norms by positions: what is whole in a block's backward: these two, the gradient of the output, gathered, and
the partial gradient of the input, before it is reduced."""
DIVIDED_LOSS_COPIES = 1
"""Further copies of the logits that DTensor's divided loss makes: its backward adds and multiplies in single operations
where the plain loss has one kernel (torch.distributed.tensor.parallel.loss)."""
QUARTER, HALF = 0.25, 0.5
"""Bytes of float8 and bfloat16 over those of float32."""


def memory_of(work: Workload, layout: Layout, fp8: bool = False) -> float:
    """Return the bytes that torch allocates on the fullest GPU; with `fp8` fsdp gathers blocks in float8."""
    return max(_stage(work, layout, stage, False, fp8) for stage in _stages(layout))


def reserved_of(work: Workload, layout: Layout, fp8: bool = False) -> float:
    """Return the bytes that torch's allocator reserves on the fullest GPU."""
    return max(_stage(work, layout, stage, True, fp8) for stage in _stages(layout))


def _stages(layout: Layout) -> set[int]:
    """Return stages that may be the fullest: the first, one without embedding and head, and the last."""
    return {0, min(1, layout.pipeline - 1), layout.pipeline - 1}


class StageWeights(NamedTuple):
    """Parameters of one stage, in bytes of the task's own type; tensor parallelism is not counted yet."""

    blocks: float
    outside: float
    largest: float
    "The largest of those outside of blocks."

    @property
    def total(self) -> float:
        return self.blocks + self.outside


def weights_of(work: Workload, layout: Layout, stage: int) -> StageWeights:
    """Return what a stage has: in torchtitan's pipelines, of what is outside of blocks, only what it uses."""
    blocks = work.block * math.ceil(work.blocks / layout.pipeline)
    if layout.pipeline == 1 or not layout.torchtitan:
        return StageWeights(blocks, work.outside, work.largest_outside)
    outside = _used_outside(work, layout, stage)
    return StageWeights(blocks, outside, outside)


def _used_outside(work: Workload, layout: Layout, stage: int) -> float:
    """Return what a stage uses outside of blocks: the last one the largest parameter, which is the head, the first one
    the rest, with the embedding."""
    last, first = work.largest_outside, work.outside - work.largest_outside
    return last if stage == layout.pipeline - 1 else first if stage == 0 else 0.0


def _stage(work: Workload, layout: Layout, stage: int, reserved: bool, fp8: bool) -> float:
    """Return the bytes on the GPUs of a stage of the pipeline."""
    state = work.at(work.base, 1)
    part = weights_of(work, layout, stage)
    weights = state["parameters"] - state["buffers"]
    here = part.total / max(1.0, work.block * work.blocks + work.outside) / layout.tensor
    if layout.pipeline == 1:
        here = 1 / layout.tensor
    parameters = weights * here / (layout.holders if layout.data == "fsdp" else 1) + state["buffers"]
    optimizer = state["optimizer"] * here / layout.holders
    gradients = state["gradients"] * here
    rests = _rests(work, layout, stage)
    if reserved:
        rests["loss"] += _hole(work, layout, stage)
    fixed = parameters + optimizer + WORKSPACE
    if layout.shards_stages:
        used = (part.blocks + _used_outside(work, layout, stage)) * state["gradients"] / max(1.0, weights)
        return fixed + _sharded_stage(work, layout, part, used, gradients / layout.holders, rests)
    if layout.data == "fsdp":
        stepping = state["rest optimizer"] * here / layout.holders
        return fixed + _fsdp(work, layout, part, gradients, rests, stepping, reserved, fp8)
    q = work.at(layout.variant, work.batch / layout.data_ranks / layout.micros)
    if layout.data == "single":
        moments = [rests[name] + q[f"held {name}"] * here for name in rests]
        moments += [q["rest backward"] + q["held backward"], q["rest optimizer"] + q["held optimizer"]]
    else:
        kept = gradients / (layout.holders if layout.data == "zero2" else 1)
        moments = [rests["forward"] + kept, rests["loss"] + gradients, rests["blocks"] + gradients]
        moments.append(q["rest optimizer"] * here + kept)
    return fixed + max(moments)


def _fsdp(
    work: Workload,
    layout: Layout,
    part: StageWeights,
    gradients: float,
    rests: dict[str, float],
    stepping: float,
    reserved: bool,
    fp8: bool,
) -> float:
    """Return what fsdp holds beside its shards at the worst moment: gathered parameters, gradients, activations.

    It gathers into a buffer of one stream and reduces into shards of gradients of another. Memory of a stream is not
    given to others, so what is reserved is the sum of what each of the three has at its worst moment.
    """
    t, m = layout.tensor, layout.micros
    state = work.at(work.base, 1)
    wide = HALF if layout.variant.precision == "bf16" else 1.0
    block_type = QUARTER if fp8 else wide
    root, block = wide * part.outside / t, block_type * work.block / t
    share = gradients / layout.holders
    if layout.pipeline > 1:  # gathered from the first micro-batch to the last
        units = root + block_type * part.blocks / t
    else:
        units = root + (1 if reserved else PREFETCHED) * block
    # Gradients are summed whole until the last micro-batch of a window, unless each is scattered. A chunk of an
    # interleaved pipeline is reduced after its last micro-batch, and if there are no more of them than ranks, before
    # the next chunk begins.
    summed = 0.0 if m == 1 or layout.scatters else gradients / (layout.chunks if m <= layout.pipeline else 1)
    waiting = share if layout.scatters else summed
    unit = work.block / t
    # the gradients of a block, with its copy that is reduced, and of the head, which waits for the end
    passing = wide * unit + (0.0 if summed else unit + wide * part.largest / t)
    held = {name: 0.0 if reserved else share * state[f"held {name}"] / max(1.0, state["gradients"]) for name in rests}
    moments = [units + rests[name] + max(waiting, held[name]) for name in ("forward", "loss")]
    moments.append(units + rests["blocks"] + max(waiting, held["blocks"]) + passing)
    # the end: a gradient is reduced whole, in the type of the parameters
    whole = max(work.block, part.outside) / t
    rest = 0.0 if reserved else share
    moments.append(root + (summed or wide * part.outside / t) + whole + rest)
    moments.append(rest + stepping)
    if not reserved:
        return max(moments)
    return max(moments) + share + max(root, PREFETCHED * block)


def _sharded_stage(
    work: Workload, layout: Layout, part: StageWeights, gradients: float, share: float, rests: dict[str, float]
) -> float:
    """Return what `pipeline.shard` holds beside its shards at the worst moment: all weights of the stage, gathered for
    the whole update, and its gradients, which are reduced one block after the other at the end."""
    reducing = max(work.block, part.outside) / layout.tensor
    return (part.total + gradients) / layout.tensor + max(*rests.values(), reducing + share)


def _rests(work: Workload, layout: Layout, stage: int) -> dict[str, float]:
    """Return what forward, the loss's backward and the blocks' backward hold beside state, on one stage."""
    p, t = layout.pipeline, layout.tensor
    q = work.at(layout.variant, work.batch / layout.data_ranks / layout.micros)
    hidden = q["hidden"] / layout.context
    mixed = 1 / t if layout.sequence else 1 - DIVIDED + DIVIDED / t
    fixed = max(0.0, work.lines[layout.variant][0]["block activations"])  # casts of weights: tensor ranks divide them
    kept = max(0.0, q["block activations"] - fixed) / layout.context * mixed + fixed / t
    one = q["rest blocks"] - q["block activations"]  # what the backward of a block adds
    passing = max(0.0, one) / layout.context * mixed
    outside = {
        name: max(0.0, q[f"rest {name}"] - q["block activations"]) / layout.context for name in ("forward", "loss")
    }
    if t > 1 and layout.split_loss:
        again = DIVIDED_LOSS_COPIES * q["loss"] / layout.context
        outside = {name: (size + again) / t for name, size in outside.items()}
    if t > 1 and layout.sequence:
        spread = hidden * (1 - 1 / t)
        passing += PASSING_WHOLE * spread
        outside = {name: size + spread for name, size in outside.items()}  # the head's input is gathered
        if not work.recomputes(layout.variant):
            kept += KEPT_WHOLE * spread * work.blocks
    if p > 1:
        kept = kept * math.ceil(work.blocks / p) / max(1, work.blocks) * in_flight(layout, stage)
        # torch.distributed.pipelining has a buffer for every micro-batch's input and output gradient; those in flight
        # are the blocks' own inputs, and their outputs are kept instead
        kept += 2 * layout.micros * hidden / (t if layout.sequence else 1)
        if stage < p - 1:
            return dict.fromkeys(("forward", "loss", "blocks"), kept + passing)
    return {**{name: kept + size for name, size in outside.items()}, "blocks": kept + passing}


def _hole(work: Workload, layout: Layout, stage: int) -> float:
    """Return what stays reserved and unused during the loss: the place of logits that were cast to a wider type. It is
    too small for their gradients, which are as large as the cast ones, and these take two further places."""
    if stage < layout.pipeline - 1:
        return 0.0
    q = work.at(layout.variant, work.batch / layout.data_ranks / layout.micros)
    return q["narrow loss"] / layout.context / (layout.tensor if layout.split_loss else 1)


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
