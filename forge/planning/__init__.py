"""Planning: how much memory a recipe needs on each device, from fake tensors alone, and which strategy to take.

One training step is rehearsed (`rehearse`) with tensors that have shapes and no values; strategies are arithmetic on
what it shows (`rows`); `plan_memory` does all of it for a recipe.
"""

from forge.planning.advice import Advice, advise
from forge.planning.footprint import WORKSPACE, Footprint, Moment
from forge.planning.plan import MemoryPlan, device_memory, plan_memory
from forge.planning.rehearsal import rehearse
from forge.planning.strategies import Levers, StrategyRow, rows

__all__ = [
    "WORKSPACE",
    "Advice",
    "Footprint",
    "Levers",
    "MemoryPlan",
    "Moment",
    "StrategyRow",
    "advise",
    "device_memory",
    "plan_memory",
    "rehearse",
    "rows",
]
