"""Tuning: measure a learning rate, the largest batch, the fastest step, or the data workers, on fresh tasks.

::

    from forge.tuning import batch_range, draw_lr, lr_range, speed_range

    curve = lr_range(MyTask, train, plugins=["amp"])
    draw_lr(curve, "MyTask", "lr.png")
    print(curve.suggestion)
    print(speed_range(MyTask, lambda: train).change.plugins)

`forge tune lr RECIPE`, and `batch`, `speed` and `workers` in place of `lr`, do the same from the command line.
"""

from __future__ import annotations

from forge_speed.levers import Change, Lever
from forge_speed.speed import speed_range
from forge_speed.speed_plot import draw_speed
from forge_speed.speed_report import LeverRow, SpeedReport, StepReading

from forge.tuning.batch import BatchReport, Probe, batch_range
from forge.tuning.lr import LRCurve, lr_range
from forge.tuning.plot import draw_lr
from forge.tuning.workers import WorkersProbe, WorkersReport, workers_range

__all__ = [
    "BatchReport",
    "Change",
    "LRCurve",
    "Lever",
    "LeverRow",
    "Probe",
    "SpeedReport",
    "StepReading",
    "WorkersProbe",
    "WorkersReport",
    "batch_range",
    "draw_lr",
    "draw_speed",
    "lr_range",
    "speed_range",
    "workers_range",
]
