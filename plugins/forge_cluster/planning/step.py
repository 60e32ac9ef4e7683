"""Step: what an update of a task costs one device, counted in dry runs on a few samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from forge.config import Recipe
from forge.config.build import plugin_class
from forge.data.accumulation_windows import batch_size
from forge.data.sharding import RankLoader
from forge.errors import DataError
from forge.planning.blocks import repeated, size
from forge.planning.dry_run import run_dry
from forge.planning.footprint import Footprint
from forge.planning.plan import first_batch
from forge.planning.tracker import Tracker
from forge.torch_internals import TorchDispatchMode, pytree

EXPERTS = ".experts"
"""How the names of modules end that expert_parallel divides, unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """Bytes of the state; bytes and operations of one sample."""

    batch: int
    "Samples of an update, over all ranks."
    parameters: float
    gradients: float
    optimizer: float
    held: float
    "Beside the state at the worst moment: activations, mostly. Of a sample; `held_fixed` of any number of them."
    held_fixed: float = 0.0
    kept: float
    "What forward keeps for backward where nothing is recomputed."
    matmul: float
    "Operations of forward and backward, recomputed ones included."
    attention: float = 0.0
    forward: float = 1 / 3
    "The share of forward; 1/4 where backward repeats it."
    calls: int = 0
    "Operations that the host starts, whatever the number of samples."
    blocks: int = 0
    block: float = 0.0
    "Parameters of the largest block."
    hidden: float = 0.0
    "What one block hands to the next."
    experts: float = 0.0
    "Parameters of experts."
    short: bool = False
    "Whether matrix products run in bf16."
    wide: float = 1.0
    "Bytes of a parameter that fsdp gathers, over those it has."
    compiled: bool = False
    seconds: float | None = None
    "Measured time of the update on one GPU, in the place of one from operations."


class OpCounter(TorchDispatchMode):
    """Counts the operations of a dry run by phase; they run unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.flops: Counter[tuple[bool, str]] = Counter()
        "By whether it is attention, and phase."
        self.calls = self.hidden = self.blocks = self.experts = 0

    def watch(self, task: nn.Module, tracker: Tracker) -> None:
        """Note the task's experts, and what its repeated blocks hand on."""
        blocks = repeated(task)
        self.blocks = len(blocks)
        for block in blocks:
            block.register_forward_hook(self._note)
        experts = [module for name, module in task.named_modules() if f".{name}".endswith(EXPERTS)]
        self.experts = size(parameter for module in experts for parameter in module.parameters())

    def forget(self) -> None:
        """Start the next update."""
        self.flops.clear()
        self.calls = 0

    def _note(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        handed = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)][:1]
        self.hidden = sum(tensor.numel() * tensor.element_size() for tensor in handed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim" or getattr(func, "is_view", False):
            return out
        self.calls += 1
        packet = getattr(func, "_overloadpacket", func)
        if packet in flop_registry:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            half = 2 if named.get("is_causal") else 1  # torch's formula counts the whole square
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) // half
            self.flops["attention" in str(packet), self.phase] += flops
        return out


def count_step(recipe: Recipe) -> UpdateCost:
    """Run a step of the recipe dry, on a few samples and on twice as many: what grows with them grows linearly."""
    batch = first_batch(recipe)
    samples = batch_size(batch)
    if not samples:
        raise DataError(f"The train loader yields a {type(batch).__name__}, whose samples forge cannot count.")
    divides = {name for name in recipe.plugins if name == "accumulate" or plugin_class(name).axes}
    stack = {name: given for name, given in recipe.plugins.items() if name not in divides}
    few, more = min(samples, 2), min(samples, 4)
    least, _ = _dry(recipe, batch, samples // few, stack)
    most, counter = _dry(recipe, batch, samples // more, stack)
    plain = {name: given for name, given in stack.items() if name != "remat"}
    whole = least if plain == stack else _dry(recipe, batch, samples // few, plain)[0]
    low, high = (max(f.rest("forward"), f.rest("backward")) for f in (least, most))
    each = (high - low) / (most.samples - least.samples) if most.samples > least.samples else low / least.samples
    total = sum(counter.flops.values())
    attention = sum(flops for (is_attention, _), flops in counter.flops.items() if is_attention)
    half = 0.5 if recipe.plugins.get("fsdp", {}).get("mixed_precision") else 1.0
    return UpdateCost(
        batch=samples,
        parameters=least.parameters,
        gradients=least.gradients,
        optimizer=least.optimizer,
        held=each,
        held_fixed=max(0.0, low - each * least.samples),
        kept=whole.activations / whole.samples,
        matmul=(total - attention) / most.samples,
        attention=attention / most.samples,
        forward=sum(n for (_, phase), n in counter.flops.items() if phase == "forward") / total if total else 1 / 3,
        calls=counter.calls,
        blocks=counter.blocks,
        block=least.block,
        hidden=counter.hidden / most.samples,
        experts=counter.experts,
        short="amp" in stack or half < 1,
        wide=half,
        compiled="compile" in stack,
    )


def _dry(recipe: Recipe, batch: Any, parts: int, stack: Mapping[str, Mapping[str, Any]]) -> tuple[Footprint, OpCounter]:
    counter = OpCounter()
    part = next(iter(RankLoader([batch], 0, parts, "train"))).batch
    return run_dry(recipe.make_task, part, stack, counter=counter), counter
