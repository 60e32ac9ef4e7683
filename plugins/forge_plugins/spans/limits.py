"""What limits a run, by its spans."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import forge
from forge.data.sample_seeding import Seeded
from forge.spans.record import HookTimes
from forge.spans.verdict import Measured, Verdict, verdict
from forge_plugins.spans.flops import FlopCount

OFTEN = 0.5
"""Waits for the device in an update, from which they may be what limits it."""


def batches_of(trainer: forge.Run) -> tuple[Seeded | None, int | None]:
    """Return what makes the batches of the training data, and its number of workers, where that is forge's own."""
    loader: Any = trainer.feed.loader
    while hasattr(loader, "loader"):
        loader = loader.loader
    made = getattr(loader, "dataset", None)
    return made if isinstance(made, Seeded) else None, getattr(loader, "num_workers", None)


def limit_of(
    trainer: forge.Run,
    times: HookTimes,
    flops: FlopCount,
    works: float | None,
    syncs: Sequence[dict[str, Any]],
    ranks: Sequence[float],
) -> Verdict:
    """Return the verdict on the updates after the first. `works` are the seconds that a GPU works in one, if known,
    `syncs` the lines that make the host wait, `ranks` the seconds of each rank's own work."""
    phases, often = times.phases(), sum(row["per_update"] for row in syncs)
    batches, workers = batches_of(trainer)
    made = [0.0, 0.0] if batches is None or batches.spent is None else batches.spent.tolist()
    if often >= OFTEN:
        busy = flops.least_seconds(trainer)  # a host that waits in the update hides what the GPU works
    else:
        busy = None if works is None else works - times.phases(on_device=True)["to_device"]  # a copy is no work
    # a wait for the device costs what the device idles for it, at most
    idle = 0.0 if busy is None else max(0.0, sum(phases.values()) - phases["evaluate"] - phases["checkpoint"] - busy)
    return verdict(
        Measured(
            phases=phases,
            on_cpu=trainer.env.device.type == "cpu",
            busy=busy,
            calls=flops.calls,
            reads=flops.reads,
            collate=phases["data"] * made[1] / sum(made) if sum(made) else None,
            workers=workers,
            cores=os.cpu_count() or 1,
            syncs={f"{row['file']}:{row['line']}": idle * row["per_update"] / often for row in syncs if often >= OFTEN},
            ranks=ranks,
            updates=times.updates,
            provides=frozenset(thing for plugin in trainer.stack for thing in plugin.provides),
        )
    )
