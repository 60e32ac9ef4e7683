"""Planning: the memory that a recipe needs on each device, from fake tensors alone, and the best strategy.

`run_dry` runs a training step with tensors that have shapes and no values; `rows` computes every strategy from that;
`plan_memory` does both for a recipe.
"""

from forge.planning.advice import Advice, advise
from forge.planning.dry_run import run_dry
from forge.planning.footprint import WORKSPACE, Footprint, Moment
from forge.planning.plan import MemoryPlan, device_memory, plan_memory
from forge.planning.strategies import DryStep, Levers, StrategyRow, rows

__all__ = [
    "WORKSPACE",
    "Advice",
    "DryStep",
    "Footprint",
    "Levers",
    "MemoryPlan",
    "Moment",
    "StrategyRow",
    "advise",
    "device_memory",
    "plan_memory",
    "rows",
    "run_dry",
]
