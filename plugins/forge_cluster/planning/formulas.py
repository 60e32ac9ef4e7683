"""Memory and time of an update under a layout of ranks, by formula: docs/planning-clusters.md derives them."""

from __future__ import annotations

from typing import NamedTuple

from forge.planning.footprint import WORKSPACE
from forge_cluster.planning.hardware import LAUNCH, Cluster
from forge_cluster.planning.layouts import Layout
from forge_cluster.planning.step import UpdateCost

GATHERED = 2
"""Blocks that fsdp holds whole at a time: the one that computes, and the next one."""
CUT = 24 / 34
"""Share of a transformer block's activations that tensor parallelism divides (Korthikanti et al., 2022)."""
PASSES = 5
"""How often an update moves the bytes of an activation: twice in forward, three times in backward."""
CHOSEN = 2
"""Experts that a token chooses, as in Mixtral."""
BUBBLE = {"gpipe": 1.0, "1f1b": 1.0, "interleaved_1f1b": 1 / 2}
"""Time of a pipeline's bubble over that of 1f1b: two stages a rank halve it (Narayanan et al., 2021)."""


class RankWeights(NamedTuple):
    """Bytes of the parameters that a rank of the fullest stage computes with, before fsdp or zero divide them."""

    dense: float
    experts: float
    block: float
    "The largest block, without its experts."
    outside: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


class UpdateTime(NamedTuple):
    """Seconds of an update."""

    compute: float
    waits: float
    "Communication that nothing hides."
    bubble: float

    @property
    def total(self) -> float:
        return sum(self)


def weights_of(step: UpdateCost, layout: Layout) -> RankWeights:
    block = (step.block - step.experts / max(1, step.blocks)) / layout.tensor
    outside = (step.parameters - step.block * step.blocks) / layout.tensor
    dense = block * -(-step.blocks // layout.pipe) + outside
    return RankWeights(dense, step.experts / layout.pipe / layout.expert, block, outside)


def memory_of(step: UpdateCost, layout: Layout) -> float:
    """Return the bytes that torch allocates on the fullest GPU."""
    w, gradient = weights_of(step, layout), step.gradients / step.parameters
    kept = w.dense / layout.holders + w.experts / max(1, layout.holders // layout.expert)
    divided = layout.data * layout.context if layout.zero else 1
    state = kept + step.optimizer / step.parameters * kept / divided + _held(step, layout) + WORKSPACE
    if layout.shard == 1:
        return state + gradient * w.total / (divided if layout.zero == 2 else 1)
    if layout.pipe > 1:  # a stage is gathered from the first micro-batch to the last
        return state + (step.wide + gradient) * w.total
    gathered = step.wide * (w.outside + GATHERED * (w.block + w.experts / max(1, step.blocks)))
    return state + gathered + gradient * (max(w.block, w.outside) + kept)


def _held(step: UpdateCost, layout: Layout) -> float:
    """Return the activations, with all else that the worst moment holds beside the state."""
    held = step.held_fixed + step.held * layout.samples(step.batch) * _mixed(layout) / layout.context
    in_flight = layout.micros if layout.schedule == "gpipe" else min(layout.micros, layout.pipe)
    return held * in_flight / layout.pipe if layout.pipe > 1 else held


def _mixed(layout: Layout) -> float:
    return 1 - CUT + CUT / layout.tensor


def time_of(step: UpdateCost, layout: Layout, cluster: Cluster) -> UpdateTime:
    """Return the time of an update."""
    forward, backward = _computed(step, layout, cluster)
    w = weights_of(step, layout)
    stepped = (2 * step.parameters + step.gradients + 2 * step.optimizer) / step.parameters * w.total
    divided = layout.holders * (layout.data * layout.context if layout.zero else 1)
    compute = layout.micros * (forward + backward) + stepped / divided / cluster.bytes_per_second
    waits = layout.micros * _inside(step, layout, cluster) + _exchanged(step, layout, cluster, forward, backward)
    return UpdateTime(compute, waits, (layout.pipe - 1) * (forward + backward) * BUBBLE[layout.schedule])


def _computed(step: UpdateCost, layout: Layout, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of forward and backward of a micro-batch on one rank."""
    samples, parts = layout.samples(step.batch), layout.context * layout.pipe
    many = cluster.shares["many"] if layout.mesh else 1.0
    flops = step.matmul / cluster.flops("matmul", step.short) + step.attention / cluster.flops("attention", step.short)
    moved = PASSES * step.kept / cluster.bytes_per_second * (cluster.shares["compiled"] if step.compiled else 1.0)
    device = samples * (flops / layout.tensor + moved * _mixed(layout)) / parts
    if step.seconds is not None:
        device = step.seconds / step.batch * samples / parts / layout.tensor
    seconds = many * max(device, step.calls / layout.pipe * LAUNCH if step.seconds is None else 0.0)
    return seconds * step.forward, seconds * (1 - step.forward)


def _inside(step: UpdateCost, layout: Layout, cluster: Cluster) -> float:
    """Return what a micro-batch waits for inside its layers: nothing hides what a layer needs at once."""
    passed = step.hidden * layout.samples(step.batch) / layout.context
    blocks, repeats = -(-step.blocks // layout.pipe), 1 if step.forward < 0.3 else 0
    seconds = (4 + 2 * repeats) * blocks * 2 * cluster.ring(passed, layout.tensor)
    # tokens go to their experts and come back, in both passes
    seconds += (4 + 2 * repeats) * blocks * cluster.ring(CHOSEN * passed, layout.expert, layout.tensor)
    if layout.context > 1:  # a ring of keys and values, behind the attention of the part before it
        sent = (3 + repeats) * blocks * cluster.ring(2 * passed * layout.context, layout.context, layout.tensor)
        behind = step.attention * layout.samples(step.batch) / layout.context / layout.pipe / layout.tensor
        seconds += max(0.0, sent - behind / cluster.flops("attention", step.short))
    return seconds + (4 * cluster.ring(passed, 2, layout.tensor * layout.context) if layout.pipe > 1 else 0.0)


def _exchanged(step: UpdateCost, layout: Layout, cluster: Cluster, forward: float, backward: float) -> float:
    """Return what an update waits for weights and gradients, beyond what hides behind its passes."""
    w, peers, stride = weights_of(step, layout), layout.samplers * layout.context, layout.tensor * layout.pipe
    gradients, units = step.gradients / step.parameters * w.total, -(-step.blocks // layout.pipe) + 1
    reduced = cluster.ring(gradients, peers, stride)
    if layout.zero:  # stage 1 reduces all, stage 2 its part; parameters come after the optimizer: nothing hides them
        return _beyond((3 - layout.zero) * reduced, backward, units) + cluster.ring(w.total, peers, stride)
    if layout.shard == 1:
        return 2 * reduced if layout.pipe > 1 else _beyond(2 * reduced, backward, units)
    gathered = cluster.ring(step.wide * w.dense, layout.holders, stride)
    scattered = cluster.ring(gradients, layout.holders, stride)
    scattered += 2 * cluster.ring(gradients / layout.holders, layout.data, stride * layout.holders)
    if layout.pipe > 1:
        return gathered + scattered
    return _beyond(gathered, forward, units) + _beyond(gathered + scattered, backward, units)


def _beyond(seconds: float, room: float, units: int) -> float:
    """Return what is not hidden: the first of so many messages, and what does not fit behind the pass."""
    return max(seconds / units, seconds - room)
