"""Time of a layout's update: computation by FLOPs and bytes, collectives by their formulas, and what hides what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from forge_cluster.planning.collectives import Group, group
from forge_cluster.planning.hardware import Cluster
from forge_cluster.planning.layouts import Layout
from forge_cluster.planning.memory import DIVIDED, weights_of
from forge_cluster.planning.pipeline_events import Action, PipelineRun, closed_form, simulate
from forge_cluster.planning.workload import PHASES, Variant, Workload


@dataclass(frozen=True, slots=True)
class UpdateTiming:
    """Seconds of an update, on the slowest rank."""

    compute: float
    exposed: float
    "Communication that nothing hides."
    hidden: float
    bubble: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.bubble


@dataclass(frozen=True, slots=True)
class Model:
    """The cost model of a task on a cluster."""

    work: Workload
    cluster: Cluster
    scale: float = 1.0
    "Measured over predicted time of a step on one GPU."
    fp8: bool = False
    "Whether the blocks' matrix products run in float8."
    _known: dict[object, tuple[float, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def calibrated(self) -> Model:
        """Return the model scaled to the step that was measured on the cluster, if one was."""
        measured = self.cluster.measured
        if measured is None:
            return self
        asked = "fp32" if measured.precision == "fp32" else "amp"
        variant = Variant(asked, measured.remat)
        if variant not in self.work.lines:
            variant = next(v for v in self.work.lines if v.short == (asked != "fp32"))
        one = replace(self.cluster, efficiency=replace(self.cluster.efficiency, many=1.0))
        plain = Model(self.work, one, fp8=self.fp8)
        predicted = sum(plain.compute(variant, measured.samples))
        return Model(self.work, self.cluster, measured.seconds / predicted, self.fp8)

    def compute(
        self, variant: Variant, samples: float, tensor: int = 1, context: int = 1, sequence: bool = False
    ) -> tuple[float, ...]:
        """Return the seconds of forward, backward and optimizer for one micro-batch of the whole model."""
        key = variant, samples, tensor, context, sequence
        if key not in self._known:
            self._known[key] = self._computed(*key)
        return self._known[key]

    def _computed(
        self, variant: Variant, samples: float, tensor: int, context: int, sequence: bool
    ) -> tuple[float, ...]:
        cluster, reached = self.cluster, self.cluster.efficiency
        precision = "bf16" if variant.short else "fp32"
        times = []
        for phase in PHASES:
            # the optimizer has the task's own type, whatever the passes compute in
            q = self.work.at(variant if phase != "optimizer" else self.work.base, samples)
            products = q[f"matmul {phase}"]
            attention = q[f"attention {phase}"]
            inside = q["block flops"] / max(1.0, q["matmul forward"] + q["attention forward"])
            low = inside * products if self.fp8 and phase != "optimizer" else 0.0
            device = (products - low) / (cluster.peak(precision) * reached.matmul)
            device += low / (cluster.peak("fp8") * reached.fp8)
            device += attention / (cluster.peak(precision) * reached.attention)
            traffic = q[f"bytes {phase}"]
            if self.work.compiled and phase != "optimizer":
                traffic *= reached.compiled
            moved = traffic / (cluster.memory_bandwidth * reached.memory)
            if phase != "optimizer":
                mixed = 1 / tensor if sequence else 1 - DIVIDED + DIVIDED / tensor
                device = (device / tensor + moved * mixed) / context
            else:
                device += moved
            host = q[f"ops {phase}"] * cluster.launch * (reached.compiled_launch if self.work.compiled else 1.0)
            times.append(self._factor * max(device, host))
        crowd = max(1.0, cluster.gpus_per_node / cluster.cores) if cluster.cores else 1.0
        return tuple(crowd * time for time in times)

    def time(self, layout: Layout, simulated: bool = False) -> UpdateTiming:
        """Return the time of an update; the pipeline's by its formula, or event by event."""
        work, m, p = self.work, layout.micros, layout.pipeline
        samples = work.batch / layout.data_ranks / m
        forward, backward, step = self.compute(layout.variant, samples, layout.tensor, layout.context, layout.sequence)
        inside = self._inside(layout.variant, samples)
        # of a whole model's pass: what the mean stage and the last stage, with the head, compute
        deep = math.ceil(work.blocks / p) / work.blocks if work.blocks else 1 / p
        mean = inside * deep + (1 - inside) / p if p > 1 else 1.0
        worst = inside * deep + (1 - inside) if p > 1 else 1.0
        extra = self._layers(layout, samples, attention=self._attention(layout, samples) * deep)
        exchanged, hidden = self._exchanged(layout, forward * worst, backward * worst)
        optimizer = step / layout.holders / layout.tensor * self._stage_share(layout)
        bubble = 0.0
        compute = m * (forward + backward) * worst + optimizer
        if p > 1:
            f, b = forward * mean + extra[0], backward * mean + extra[1]
            send = self._send(layout, samples)
            if simulated:
                run = self.pipeline(layout)
                ends = run.seconds
            else:
                ends = closed_form(layout.schedule or "1F1B", p, m, f, b, layout.chunks)
                ends += m * (worst - mean) * (forward + backward) + 2 * (p - 1) * layout.chunks * send
            bubble = max(0.0, ends - m * ((forward + backward) * worst + sum(extra)))
        return UpdateTiming(compute, m * sum(extra) + exchanged, hidden, bubble)

    def pipeline(self, layout: Layout) -> PipelineRun:
        """Simulate the pipeline of an update, with the head on its last stage."""
        work, p, v = self.work, layout.pipeline, layout.chunks
        samples = work.batch / layout.data_ranks / layout.micros
        forward, backward, _ = self.compute(layout.variant, samples, layout.tensor, layout.context, layout.sequence)
        inside = self._inside(layout.variant, samples)
        deep = math.ceil(work.blocks / p) / work.blocks
        extra = self._layers(layout, samples, attention=self._attention(layout, samples) * deep)
        splits = layout.schedule == "InterleavedZeroBubble"

        def seconds(action: Action) -> float:
            share = (inside * deep) / v + ((1 - inside) if action.stage == p * v - 1 else 0.0)
            if action.kind == "F":
                return forward * share + extra[0] / v
            return (backward * share + extra[1] / v) / (2 if splits else 1)

        schedule = layout.schedule or "1F1B"
        return simulate(schedule, p, layout.micros, seconds, self._send(layout, samples), v)

    def flops(self) -> float:
        """Return the model's own operations of an update; recomputed ones do not count."""
        variant = next(v for v in self.work.lines if not v.remat)
        q = self.work.at(variant, self.work.batch)
        return sum(q[f"{kind} {phase}"] for kind in ("matmul", "attention") for phase in PHASES)

    def mfu(self, timing: UpdateTiming, gpus: int) -> float:
        """Return the share of the GPUs' peak that the model's own operations reach."""
        short = any(v.short for v in self.work.lines)
        return self.flops() / (timing.total * gpus * self.cluster.peak("bf16" if short else "fp32"))

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def _factor(self) -> float:
        return self.scale * (self.cluster.efficiency.many if self.cluster.gpus > 1 else 1.0)

    def _inside(self, variant: Variant, samples: float) -> float:
        q = self.work.at(variant, samples)
        return min(1.0, q["block flops"] / max(1.0, q["matmul forward"] + q["attention forward"]))

    def _attention(self, layout: Layout, samples: float) -> float:
        q = self.work.at(layout.variant, samples)
        peak = self.cluster.peak("bf16" if layout.variant.short else "fp32") * self.cluster.efficiency.attention
        return self._factor * q["attention forward"] / peak / layout.tensor / layout.context

    def _layers(self, layout: Layout, samples: float, attention: float) -> tuple[float, float]:
        """Return the exposed communication inside the layers of one stage, of a forward and of a backward."""
        q = self.work.at(layout.variant, samples)
        blocks = math.ceil(self.work.blocks / layout.pipeline)
        tensor = self._group(layout, "tensor").all_reduce(q["hidden"] / layout.context)
        again = 1 if self.work.recomputes(layout.variant) else 0
        forward, backward = 2 * blocks * tensor, (2 + 2 * again) * blocks * tensor
        if layout.context > 1:
            ring = self._group(layout, "context")
            kv = q["key values"] / layout.context / layout.tensor
            moved = blocks * (layout.context - 1) * ring.send(kv)
            forward += max(0.0, moved - self.cluster.efficiency.overlap * attention)
            backward += max(0.0, (2 + again) * moved - self.cluster.efficiency.overlap * (2 + again) * attention)
        return forward, backward

    def _exchanged(self, layout: Layout, forward: float, backward: float) -> tuple[float, float]:
        """Return what data parallelism exchanges in an update: exposed, and hidden behind forward and backward."""
        work, m, p = self.work, layout.micros, layout.pipeline
        if layout.data == "single" or layout.data_ranks * layout.context == 1:
            return (self._sum_outside(layout) if p > 1 and not layout.torchtitan else 0.0), 0.0
        state = work.at(work.base, 1)
        stage = self._stage_share(layout) / layout.tensor
        parameters, gradients = (state["parameters"] - state["buffers"]) * stage, state["gradients"] * stage
        units = max(1, math.ceil(work.blocks / p)) + 1
        shard = self._group(layout, "shard")
        if p > 1 and not layout.torchtitan:  # after the last backward: nothing hides it
            gather = units * shard.all_gather(parameters / units) if layout.shards_stages else 0.0
            reduced = shard.reduce_scatter(gradients) if layout.shards_stages else shard.all_reduce(gradients)
            between = self._group(layout, "replicate").all_reduce(gradients / layout.shard)
            return self._sum_outside(layout) + gather + reduced + between, 0.0
        behind = self.cluster.efficiency.overlap
        if layout.data != "fsdp":
            reduced = units * shard.all_reduce(gradients / units)
            exposed, hidden = _behind(reduced, backward * behind, 1 / units, behind)
            if layout.data == "zero2":
                reduced = units * shard.reduce_scatter(gradients / units)
                exposed, hidden = _behind(reduced, backward * behind, 1 / units, behind)
            if layout.data in ("zero1", "zero2"):
                exposed += units * shard.all_gather(parameters / units)  # after the optimizer: nothing hides it
            return exposed, hidden
        gathered = parameters * (0.5 if layout.variant.precision == "bf16" else 1.0)
        gather = units * shard.all_gather(gathered / units)
        scatter = units * shard.reduce_scatter(gradients / units)
        if layout.replicate > 1:
            scatter += units * self._group(layout, "replicate").all_reduce(gradients / units / layout.holders)
        if p > 1:  # gathered once, scattered once
            first, a = _behind(gather, forward * behind, 1 / units, behind)
            last, b = _behind(scatter, backward * behind, 1 / units, behind)
            return first + last, a + b
        first, a = _behind(gather, forward * behind, 1 / units, behind)
        inner, b = _behind(gather, backward * behind, 0.0, behind)
        last, c = _behind(gather + scatter, backward * behind, 1 / units, behind)
        if layout.scatters:
            return m * (first + last), m * (a + c)
        return m * first + (m - 1) * inner + last, m * a + (m - 1) * b + c

    def _group(self, layout: Layout, axis: str) -> Group:
        """Return the ranks of an axis; those that differ in samples or slices of them are one, `shard`."""
        layers, piped = layout.tensor * layout.context, 1 if layout.torchtitan else layout.pipeline
        inner = {
            "tensor": (layout.tensor, 1),
            "context": (layout.context, layout.tensor),
            "shard": (layout.shard * layout.context, layout.tensor * piped),
            "replicate": (layout.replicate, layers * piped * layout.shard),
            "pipeline": (layout.pipeline, layers * (layout.data_ranks if layout.torchtitan else 1)),
        }
        return group(self.cluster, *inner[axis])

    def _send(self, layout: Layout, samples: float) -> float:
        hidden = self.work.at(layout.variant, samples)["hidden"] / layout.context
        return self._group(layout, "pipeline").send(hidden)

    def _sum_outside(self, layout: Layout) -> float:
        """Return the seconds in which a pipeline sums the gradients of what all its stages have."""
        state, work = self.work.at(self.work.base, 1), self.work
        share = work.outside / max(1.0, work.block * work.blocks + work.outside)
        return self._group(layout, "pipeline").all_reduce(state["gradients"] * share / layout.holders / layout.tensor)

    def _stage_share(self, layout: Layout) -> float:
        if layout.pipeline == 1 or layout.torchtitan:
            return 1 / layout.pipeline
        weights = weights_of(self.work, layout, 0)
        return weights.total / max(1.0, self.work.block * self.work.blocks + self.work.outside)


def _behind(communication: float, room: float, first: float, overlap: float) -> tuple[float, float]:
    """Return the exposed and the hidden part: the first piece has nothing to hide behind, nor has what does not fit."""
    if overlap == 0:
        return communication, 0.0
    hidden = min(communication * (1 - first) * overlap, room)
    return communication - hidden, hidden
