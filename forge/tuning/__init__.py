"""Tuning: measure a learning rate, or the largest batch that fits, with a few real updates on fresh tasks.

::

    from forge.tuning import batch_range, draw_lr, lr_range

    curve = lr_range(MyTask, train, plugins=["amp"])
    draw_lr(curve, "MyTask", "lr.png")
    print(curve.suggestion)

`forge tune lr RECIPE` and `forge tune batch RECIPE` do the same from the command line.
"""

from __future__ import annotations

from forge.tuning.batch import BatchReport, Probe, batch_range
from forge.tuning.lr import LRCurve, lr_range
from forge.tuning.plot import draw_lr

__all__ = ["BatchReport", "LRCurve", "Probe", "batch_range", "draw_lr", "lr_range"]
