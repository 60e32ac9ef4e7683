"""Sweeps: try values of options in many runs, on one machine or several, and report the best.

::

    found = forge.sweep("quickstart", {"task.lr": "log(1e-4,1e-1)"}, metric="val/accuracy", trials=20)
    print(found.best.params, found.recipe)

`forge sweep RECIPE 'task.lr=log(1e-4,1e-1)' --metric val/accuracy` does the same from the command line. Names load on
first use, so that `forge sweep --help` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_sweep.space import Space, parse_spaces
    from forge_sweep.study import SweepPlan, TrialRow
    from forge_sweep.sweep import SweepResult, SweepTarget, run_sweep

_HOME = {
    "Space": "space",
    "SweepPlan": "study",
    "SweepResult": "sweep",
    "SweepTarget": "sweep",
    "TrialRow": "study",
    "parse_spaces": "space",
    "run_sweep": "sweep",
}

__all__ = ["Space", "SweepPlan", "SweepResult", "SweepTarget", "TrialRow", "parse_spaces", "run_sweep"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge_sweep' has no attribute {name!r}")
    return getattr(import_module(f"forge_sweep.{_HOME[name]}"), name)
