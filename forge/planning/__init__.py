"""Planning: the memory that a recipe needs on each device, from fake tensors alone, and the best strategy.

`rehearse` runs a training step with tensors that have shapes and no values; `rows` computes every strategy from that;
`plan_memory` does both for a recipe.
"""

from forge.planning.advice import Advice, advise
from forge.planning.footprint import WORKSPACE, Footprint, Moment
from forge.planning.plan import MemoryPlan, device_memory, plan_memory
from forge.planning.rehearsal import rehearse
from forge.planning.strategies import Levers, RehearsedStep, StrategyRow, rows

__all__ = [
    "WORKSPACE",
    "Advice",
    "Footprint",
    "Levers",
    "MemoryPlan",
    "Moment",
    "RehearsedStep",
    "StrategyRow",
    "advise",
    "device_memory",
    "plan_memory",
    "rehearse",
    "rows",
]
