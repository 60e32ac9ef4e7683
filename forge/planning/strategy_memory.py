"""Memory of a step whose model is copied, sharded or split over devices, for `forge plan --devices`.

A copy adds its buckets, which is exact; sharding is a formula, and its rows are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from forge import registry
from forge.planning.footprint import Footprint
from forge.planning.strategies import DryStep, Levers, StrategyRow, row

PREFETCHED = 2
"""Blocks that FSDP holds whole at a time: the one that computes, and the next one."""
SIZES = (2, 4, 8)
"""Groups of devices that tensor parallelism is planned for."""


def replicated(name: str, step: DryStep) -> Iterator[StrategyRow]:
    """Everything on every device. Gradients are views into buckets, which stay allocated throughout; without views
    (gradient_as_bucket_view) they are allocated beside the buckets."""
    if step.devices == 1:
        return
    views = step.options.get(name, {}).get("bucket_view", True)
    for levers, f in step.share.items():
        peak = max(m.total + f.gradients - (m.gradients if views else 0) for m in f.moments.values())
        yield row(name, levers, f, peak, plugins={name: {}})


def sharded(name: str, step: DryStep) -> Iterator[StrategyRow]:
    """Parameters, gradients and optimizer state divided by the devices; parameters outside the blocks, two blocks at a
    time and the gradient of one are whole, and so are gradients that wait for the last micro-batch, unless each is
    scattered (`reduce`). With offload the shards and the optimizer are in the host's memory."""
    scattered = step.options.get(name, {}).get("reduce") == "micro"
    if step.devices > 1:
        for levers, f in step.share.items():
            yield _sharded(name, f, levers, 1 / step.devices, scattered=scattered, plugins={name: {}})
    for levers, f in step.least.items():
        more = {"plugins": {name: {"offload": True}}, "is_last": True}
        yield _sharded(f"{name} + offload", f, levers, 0.0, scattered=scattered, **more)


def split(name: str, step: DryStep) -> Iterator[StrategyRow]:
    """FSDP with groups of devices that share one model: weights are divided as before, blocks are gathered to 1/size,
    and a group works on one part of the batch.

    Of the 34 bytes that a transformer's layer keeps per token and width, 24 are divided and 10 are not (Korthikanti et
    al., 2022, "Reducing Activation Recomputation in Large Transformer Models"; without sequence parallelism).
    """
    devices, sharding = step.devices, registry.providers("sharding")[0]
    for size in (size for size in SIZES if devices > 1 and devices % size == 0):
        for levers, f in step.least.items():
            samples = -(-step.batch // (devices // size))
            times = samples / f.samples * (10 + 24 / size) / 34
            made = {"plugins": {sharding: {}, name: {"size": size}}, "is_last": True}
            made["scattered"] = step.options.get(sharding, {}).get("reduce") == "micro"
            f = replace(f, samples=samples)
            yield _sharded(
                f"{sharding} + {name} {size}", f, levers, 1 / devices, gathered=1 / size, times=times, **made
            )


def _sharded(
    name: str,
    f: Footprint,
    levers: Levers,
    kept: float,
    gathered: float = 1.0,
    times: float = 1.0,
    scattered: bool = False,
    **more: Any,
) -> StrategyRow:
    """Estimate a sharded strategy: `kept` is the share of parameters, gradients and optimizer state that stays on the
    device, `gathered` the share of a block that is whole there, `times` the factor of the activations; `scattered`
    tells whether gradients of a window are divided while they wait for its last micro-batch."""
    weights = f.parameters - f.buffers
    whole = round(gathered * (f.outside + PREFETCHED * f.block + max(f.block, f.outside)))
    here = f.buffers + round(kept * (weights + f.optimizer))
    summed = gathered if f.moments["forward"].gradients and not scattered else kept  # a window's first micro-batches
    computing = max(
        here + whole + round(summed * f.moments[phase].gradients) + round(times * f.rest(phase))
        for phase in ("forward", "backward")
    )
    stepping = here + round(kept * (f.gradients + f.rest("optimizer")))
    divided = replace(
        f,
        parameters=f.buffers + round(kept * weights),
        gradients=round(kept * f.gradients),
        optimizer=round(kept * f.optimizer),
        activations=round(times * f.activations),
    )
    return row(name, levers, divided, max(computing, stepping), is_estimate=True, **more)
