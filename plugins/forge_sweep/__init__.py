"""Sweeps: try values of options in many runs, on one machine or several, and report the best.

::

    found = forge.sweep("quickstart", {"task.lr": "log(1e-4,1e-1)"}, metric="val/accuracy", trials=20)
    print(found.best.params, found.recipe)

`forge sweep RECIPE 'task.lr=log(1e-4,1e-1)' --metric val/accuracy` does the same from the command line.
"""

from __future__ import annotations

from forge_sweep.space import Space, parse_spaces
from forge_sweep.study import SweepPlan, TrialRow
from forge_sweep.sweep import SweepResult, SweepTarget, run_sweep, sweep

__all__ = ["Space", "SweepPlan", "SweepResult", "SweepTarget", "TrialRow", "parse_spaces", "run_sweep", "sweep"]
