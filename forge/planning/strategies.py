"""Strategies: the memory of a step on each of N devices, computed from that on one device.

Every combination of amp and remat is rehearsed, on the whole batch and on a device's share of it. DDP adds its buckets,
which is exact; sharding is a formula, and its rows are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from forge.planning.footprint import WORKSPACE, Footprint

PREFETCHED = 2
"""Blocks that FSDP holds whole at a time: the one that computes, and the next one."""
TENSOR_PARALLEL = (2, 4, 8)


class Levers(NamedTuple):
    """Plugins that trade compute or precision for memory."""

    amp: bool = False
    remat: bool = False

    def __str__(self) -> str:
        return " + ".join(name for name, on in zip(self._fields, self, strict=True) if on)


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy with its levers: bytes on each device."""

    strategy: str
    levers: Levers
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    "Everything else at the worst moment, workspaces included."
    peak: int
    samples: int
    "Samples in a micro-batch on each device."
    is_estimate: bool = False
    "By formula instead of counted."


def rows(
    whole: Mapping[Levers, Footprint], share: Mapping[Levers, Footprint], devices: int, bucket_views: bool
) -> list[StrategyRow]:
    """Return every strategy with all rehearsed levers, from the footprints of the whole batch and of a share."""
    found = [_row("single", levers, f, f.moments[f.worst].total) for levers, f in whole.items()]
    if devices > 1:
        found += [ddp(f, levers, bucket_views) for levers, f in share.items()]
        found += [fsdp(f, levers, devices) for levers, f in share.items()]
    batch = next(iter(whole.values())).samples
    most = [(levers, f) for levers, f in share.items() if levers.remat or not any(o.remat for o in share)]
    found += [offloaded(f, levers) for levers, f in most]
    sizes = [size for size in TENSOR_PARALLEL if devices % size == 0 and devices > 1]
    return found + [tensor_parallel(f, levers, devices, size, batch) for size in sizes for levers, f in most]


def ddp(f: Footprint, levers: Levers, bucket_views: bool) -> StrategyRow:
    """Everything on every device. Gradients are views into buckets, which stay allocated throughout; without views
    (gradient_as_bucket_view) they are allocated beside the buckets."""
    peak = max(m.total + f.gradients - (m.gradients if bucket_views else 0) for m in f.moments.values())
    return _row("ddp", levers, f, peak)


def fsdp(f: Footprint, levers: Levers, devices: int) -> StrategyRow:
    """Parameters, gradients and optimizer state divided by the devices; parameters outside the blocks, two blocks at a
    time and the gradient of one are whole."""
    return _sharded("fsdp", f, levers, kept=1 / devices)


def offloaded(f: Footprint, levers: Levers) -> StrategyRow:
    """FSDP that keeps its shards and runs the optimizer in the host's memory."""
    return _sharded("fsdp + offload", f, levers, kept=0.0)


def tensor_parallel(f: Footprint, levers: Levers, devices: int, size: int, batch: int) -> StrategyRow:
    """FSDP with groups of devices that share one model: weights are divided as before, blocks are gathered to 1/size,
    and a group works on one part of the batch.

    Of the 34 bytes that a transformer's layer keeps per token and width, 24 are divided and 10 are not (Korthikanti et
    al., 2022, "Reducing Activation Recomputation in Large Transformer Models"; without sequence parallelism).
    """
    samples = -(-batch // (devices // size))
    activations = samples / f.samples * (10 + 24 / size) / 34
    name = f"fsdp + tensor_parallel {size}"
    return _sharded(name, f, levers, 1 / devices, gathered=1 / size, times=activations, samples=samples)


def _sharded(
    name: str,
    f: Footprint,
    levers: Levers,
    kept: float,
    gathered: float = 1.0,
    times: float = 1.0,
    samples: int | None = None,
) -> StrategyRow:
    """Estimate a sharded strategy: `kept` is the share of parameters, gradients and optimizer state that stays on the
    device, `gathered` the share of a block that is whole there, `times` the factor of the activations."""
    weights = f.parameters - f.buffers
    whole = round(gathered * (f.outside + PREFETCHED * f.block + max(f.block, f.outside)))
    here = f.buffers + round(kept * (weights + f.optimizer))
    computing = max(
        here + whole + round(kept * f.moments[phase].gradients) + round(times * f.rest(phase))
        for phase in ("forward", "backward")
    )
    stepping = here + round(kept * (f.gradients + f.rest("optimizer")))
    divided = replace(
        f,
        samples=samples or f.samples,
        parameters=f.buffers + round(kept * weights),
        gradients=round(kept * f.gradients),
        optimizer=round(kept * f.optimizer),
        activations=round(times * f.activations),
    )
    return _row(name, levers, divided, max(computing, stepping), is_estimate=True)


def _row(name: str, levers: Levers, f: Footprint, peak: int, is_estimate: bool = False) -> StrategyRow:
    parts = f.parameters, f.gradients, f.optimizer, f.activations
    peak += WORKSPACE
    held = f.parameters + f.optimizer + f.activations  # gradients are allocated as activations are freed
    return StrategyRow(name, levers, *parts, max(WORKSPACE, peak - held), peak, f.samples, is_estimate)
