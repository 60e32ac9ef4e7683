"""MemoryPlan: the memory of a recipe on given devices, and the recommended strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

from forge import registry
from forge.config import Recipe
from forge.config.build import plugin_class
from forge.data.accumulation_windows import batch_size
from forge.data.sharding import RankLoader
from forge.errors import DataError, ForgeError
from forge.planning.advice import Advice, advise
from forge.planning.dry_run import run_dry
from forge.planning.footprint import Footprint
from forge.planning.strategies import DryStep, Levers, StrategyRow, rows

LEVERS = frozenset({"memory", "activations"})
"""Problems that plugins cure by giving something for memory: precision, or computing `activations` again."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a recipe on each device under every strategy, and the recommended one."""

    devices: int
    memory: int
    "Of each device, in bytes."
    batch: int
    "Samples in a micro-batch, all devices together."
    asked: Levers
    "The levers of the recipe."
    levers: Levers
    "All that were planned."
    rows: list[StrategyRow]
    advice: Advice
    notes: list[str] = field(default_factory=list)


def plan_memory(recipe: Recipe, devices: int, memory: int) -> MemoryPlan:
    """Rehearse a step of the recipe on one device's share of its first batch, with and without each lever."""
    batch = first_batch(recipe)
    size = batch_size(batch)
    if not size:
        raise DataError(f"The train loader yields a {type(batch).__name__}, whose samples forge cannot count.")
    notes: list[str] = []
    share = next(iter(RankLoader([batch], devices - 1, devices, "train"))).batch  # no other is larger
    if devices > size:
        notes.append(f"A batch of {size} leaves {devices - size} of {devices} devices without a sample of their own.")
    options = dict(sorted(_levers(recipe, notes)))
    declared = registry.declared("cures")
    asked = tuple(name for name in options if name in recipe.plugins)
    frugal = tuple(name for name in options if "activations" in declared[name])
    others = {name: given for name, given in recipe.plugins.items() if name not in options}

    def measured(batch: Any) -> dict[Levers, Footprint]:
        return {
            levers: run_dry(recipe.make_task, batch, {**others, **{name: options[name] for name in levers}})
            for levers in chain.from_iterable(combinations(options, count) for count in range(len(options) + 1))
        }

    whole = measured(batch)
    step = DryStep(whole, measured(share) if devices > 1 else whole, devices, frugal, recipe.plugins)
    found = rows(step)
    compiled = {*registry.providers("compiled_code")}.intersection(recipe.plugins)
    notes += [f"{name} is left out: compiled code has other temporaries, usually fewer." for name in compiled]
    advice = advise(found, asked, memory, frugal)
    return MemoryPlan(devices, memory, size, asked, tuple(options), found, advice, notes)


def device_memory() -> int:
    """Return the memory of this machine's GPU, in bytes."""
    import torch

    if not torch.cuda.is_available():
        raise ForgeError("This machine has no GPU to take the memory from: give the GiB of each device, --memory 80.")
    return torch.cuda.get_device_properties(0).total_memory


def first_batch(recipe: Recipe) -> Any:
    for batch in recipe.make_data().train or ():
        return batch
    raise DataError("The train loader yields no batch to plan with.")


def _levers(recipe: Recipe, notes: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the plugins that give something for memory, with the options to measure them with.

    Of several that provide the same thing, one is planned: the recipe's, else the first.
    """
    things, task, taken = registry.declared("provides"), _without_values(recipe), set[str]()
    offered = [name for name, problems in registry.declared("cures").items() if not LEVERS.isdisjoint(problems)]
    for name in sorted(offered, key=lambda name: name not in recipe.plugins):
        if not taken.isdisjoint(things.get(name, ())):
            continue
        options = plugin_class(name).for_plan(recipe.plugins.get(name, {}), task)
        if options is None:
            continue
        taken.update(things.get(name, ()))
        if isinstance(options, str):
            notes.append(options.format(name=name))
        else:
            yield name, options


def _without_values(recipe: Recipe) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return recipe.make_task()
    except Exception:  # its __init__ needs real numbers
        return None
