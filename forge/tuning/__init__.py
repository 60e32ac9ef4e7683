"""Tuning: measure a learning rate, the largest batch, or the data workers, on fresh tasks.

::

    from forge.tuning import batch_range, draw_lr, lr_range

    curve = lr_range(MyTask, train)
    draw_lr(curve, "MyTask", "lr.svg")
    print(curve.suggestion)

`forge tune lr RECIPE`, and `batch` and `workers` in place of `lr`, do the same from the command line. Packages around
the core add other searches, by the entry points `forge.names` ("tuning.NAME") and `forge.commands` ("tune NAME").
"""

from __future__ import annotations

from typing import Any

from forge import registry
from forge.tuning.batch import BatchReport, Probe, batch_range
from forge.tuning.lr import LRCurve, lr_range
from forge.tuning.plot import draw_lr
from forge.tuning.step_reading import StepReading
from forge.tuning.workers import WorkersReport, workers_range

__all__ = [
    "BatchReport",
    "LRCurve",
    "Probe",
    "StepReading",
    "WorkersReport",
    "batch_range",
    "draw_lr",
    "lr_range",
    "workers_range",
]


def __getattr__(name: str) -> Any:
    """A name that a package around the core offers."""
    return registry.public(f"tuning.{name}")
