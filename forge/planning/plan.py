"""MemoryPlan: the memory of a recipe on given devices, and the recommended strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge.config import Recipe
from forge.data.accumulation_windows import batch_size
from forge.data.sharding import RankLoader
from forge.errors import DataError, ForgeError
from forge.planning.advice import Advice, advise
from forge.planning.blocks import repeated
from forge.planning.footprint import Footprint
from forge.planning.rehearsal import rehearse
from forge.planning.strategies import Levers, StrategyRow, rows

AMP, REMAT, PREFETCH, DDP = "amp", "remat", "prefetch", "ddp"
STRATEGIES = (DDP, "fsdp", "tensor_parallel")


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
    rows: list[StrategyRow]
    advice: Advice
    notes: list[str] = field(default_factory=list)


def plan_memory(recipe: Recipe, devices: int, memory: int) -> MemoryPlan:
    """Rehearse a step of the recipe on one device's share of its first batch, with and without amp and remat."""
    batch = first_batch(recipe)
    size = batch_size(batch)
    if not size:
        raise DataError(f"The train loader yields a {type(batch).__name__}, whose samples forge cannot count.")
    notes: list[str] = []
    share = next(iter(RankLoader([batch], devices - 1, devices, "train"))).batch  # no other is larger
    if devices > size:
        notes.append(f"A batch of {size} leaves {devices - size} of {devices} devices without a sample of their own.")
    asked = Levers(AMP in recipe.plugins, REMAT in recipe.plugins)
    combinations = _combinations(recipe, asked, notes)
    ahead = recipe.resolved.get("plugins", {}).get(PREFETCH, {}).get("depth", 0)

    def rehearsed(batch: Any) -> dict[Levers, Footprint]:
        return {levers: rehearse(recipe.make_task, batch, _stack(recipe, levers), ahead) for levers in combinations}

    whole = rehearsed(batch)
    bucket_views = recipe.plugins.get(DDP, {}).get("bucket_view", True)
    found = rows(whole, rehearsed(share) if devices > 1 else whole, devices, bucket_views)
    if "compile" in recipe.plugins:
        notes.append("compile is left out: compiled code has other temporaries, usually fewer.")
    return MemoryPlan(devices, memory, size, asked, found, advise(found, asked, memory), notes)


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


def _combinations(recipe: Recipe, asked: Levers, notes: list[str]) -> list[Levers]:
    remats = [False, True]
    if not asked.remat and not _repeats(recipe):
        remats = [False]
        notes.append("The task has no repeated blocks for remat; to plan with it: -p remat remat.modules=NAME.")
    return [Levers(amp, remat) for remat in remats for amp in (False, True)]


def _repeats(recipe: Recipe) -> bool:
    import torch

    try:
        with torch.device("meta"):
            return bool(repeated(recipe.make_task()))
    except Exception:  # its __init__ needs real numbers
        return True


def _stack(recipe: Recipe, levers: Levers) -> dict[str, Mapping[str, Any]]:
    """Return the recipe's plugins with these levers. bf16 stands for either short type, because fp16 reads values;
    remat's budget is met by measuring, so every block is planned as recomputed."""
    apart = (AMP, REMAT, *STRATEGIES)
    stack: dict[str, Mapping[str, Any]] = {n: options for n, options in recipe.plugins.items() if n not in apart}
    if levers.amp:
        stack[AMP] = {"dtype": "bf16"}
    if levers.remat:
        stack[REMAT] = {key: value for key, value in recipe.plugins.get(REMAT, {}).items() if key != "budget"}
    return stack
