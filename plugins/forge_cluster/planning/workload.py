"""Workload: what one update of a task costs, for any number of samples, from a few dry runs of a short version of it.

A model of 126 equal blocks is run dry with 2 and with 3 of them, on a few samples and on twice as many: everything
that is counted is linear in both, so the rest follows. A task whose blocks differ is run dry whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge.config import Recipe
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.data.sharding import RankLoader
from forge.errors import DataError
from forge.planning.blocks import repeated
from forge.planning.dry_run import run_dry
from forge.planning.footprint import Footprint
from forge.planning.plan import first_batch
from forge.torch_internals import pytree
from forge_cluster.planning.counting import OpCounter
from forge_cluster.torch_internals import without_dispatch_modes

FEW, MORE = 2, 3
"""Blocks of the short versions. remat and fsdp find blocks by their repetition, so there are at least two."""
WORTH_IT = 6
AMP, REMAT, STRATEGIES = "amp", "remat", ("zero", "pipeline", "context_parallel", "ddp", "fsdp", "tensor_parallel")
APART = (AMP, REMAT, "accumulate", "compile", *STRATEGIES)
"""Plugins that are planned, and so not measured."""
PHASES = ("forward", "backward", "optimizer")
MOMENTS = (*PHASES, "loss", "blocks")
Quantities = dict[str, float]


class Variant(NamedTuple):
    """How a step computes: in the task's own type, under amp, or wholly in bf16 (fsdp.mixed_precision); with remat."""

    precision: str
    remat: bool

    @property
    def short(self) -> bool:
        """Return whether matrix products run in bf16."""
        return self.precision != "fp32"


@dataclass(frozen=True, slots=True)
class Workload:
    """One update on one device. Counted quantities are `fixed + slope × samples`."""

    batch: int
    "Samples of an update, over all GPUs."
    blocks: int
    block: float
    "Bytes of the largest block's parameters."
    outside: float
    "Bytes of the parameters outside of blocks."
    largest_outside: float
    "Bytes of the largest of these."
    lines: Mapping[Variant, tuple[Quantities, Quantities]]
    positions: int | None = None
    "Length of a sample, if blocks hand on (samples, positions, width)."
    heads: int | None = None
    compiled: bool = False
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    "The recipe's plugins with their options."
    _known: dict[tuple[Variant, float], Quantities] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, variant: Variant, samples: float) -> Quantities:
        """Return all quantities of a micro-batch of so many samples; do not change them."""
        found = self._known.get((variant, samples))
        if found is None:
            fixed, slope = self.lines[variant]
            found = {name: max(0.0, value + samples * slope[name]) for name, value in fixed.items()}
            self._known[variant, samples] = found
        return found

    def recomputes(self, variant: Variant) -> bool:
        """Return whether backward repeats matrix products of forward: by remat, or because the task does it itself."""
        q = self.at(variant, 1)
        return q["matmul backward"] > 2.02 * q["matmul forward"]

    @property
    def base(self) -> Variant:
        """Return the variant whose parameters, gradients and optimizer state count."""
        return next(variant for variant in self.lines if variant.precision != "bf16")


def count_workload(recipe: Recipe, precisions: tuple[str, ...] = ("fp32", "amp", "bf16")) -> Workload:
    """Rehearse the recipe in every variant."""
    batch = first_batch(recipe)
    size = batch_size(batch)
    if not size:
        raise DataError(f"The train loader yields a {type(batch).__name__}, whose samples forge cannot count.")
    window = recipe.plugins.get("accumulate", {}).get("window", 1 if "accumulate" not in recipe.plugins else 4)
    few = 2 if size >= 4 else 1
    shares = [_part(batch, size, samples) for samples in dict.fromkeys((few, min(size, 2 * few)))]
    skeleton = Skeleton(recipe)
    remats = [False, True] if skeleton.blocks or REMAT in recipe.plugins else [False]
    lines: dict[Variant, tuple[Quantities, Quantities]] = {}
    footprint, counter = None, OpCounter()
    for precision in precisions:
        for remat in remats:
            points: dict[tuple[int, int], Quantities] = {}
            for depth in skeleton.depths:
                for share in shares:
                    counter = OpCounter()
                    footprint = run_dry(
                        skeleton.maker(depth, precision),
                        _cast(share) if precision == "bf16" else share,
                        _stack(recipe, precision, remat),
                        counter=counter,
                    )
                    points[footprint.samples, depth] = _quantities(footprint, counter)
            lines[Variant(precision, remat)] = _line(points, skeleton.blocks)
    assert footprint is not None
    whole = skeleton.task
    return Workload(
        batch=size * (window if isinstance(window, int) else 1),
        blocks=skeleton.blocks,
        block=skeleton.block_bytes,
        outside=skeleton.outside_bytes,
        largest_outside=max((p.numel() * p.element_size() for p in skeleton.outside(whole)), default=0),
        lines=lines,
        positions=counter.positions,
        heads=counter.heads,
        compiled="compile" in recipe.plugins,
        recipe=recipe.plugins,
    )


class Skeleton:
    """The task without values, and short versions of it."""

    def __init__(self, recipe: Recipe):
        self._make: Callable[[], TaskModule] = recipe.make_task
        try:
            with torch.device("meta"):
                self.task = recipe.make_task()
            self._on_meta = True
        except Exception:  # its __init__ needs values
            self.task, self._on_meta = recipe.make_task(), False
        found = repeated(self.task)
        self.blocks = len(found)
        self.block_bytes = max((_size(block) for block in found), default=0)
        self.outside_bytes = sum(p.numel() * p.element_size() for p in self.outside(self.task))
        self._place = _place_of(self.task, found)
        self._short: dict[int, TaskModule] = {}
        short = self._place is not None and self.blocks >= WORTH_IT
        self.depths = (FEW, MORE) if short else (self.blocks,)

    def outside(self, task: nn.Module) -> list[nn.Parameter]:
        inside = {id(p) for block in repeated(task) for p in block.parameters()}
        return [p for p in task.parameters() if id(p) not in inside]

    def maker(self, depth: int, precision: str) -> Callable[[], TaskModule]:
        """Return a function that makes the task with `depth` blocks, in bf16 if that is the precision."""

        def make() -> TaskModule:
            if self._on_meta:
                if depth not in self._short:
                    with without_dispatch_modes():
                        self._short[depth] = self._cut(copy.deepcopy(self.task), depth)
                with without_dispatch_modes():
                    task = copy.deepcopy(self._short[depth])
            else:
                task = self._cut(self._make(), depth)
            if self._on_meta or precision == "bf16":
                _to_host(task, torch.bfloat16 if precision == "bf16" else None)
            return task

        return make

    def _cut(self, task: TaskModule, depth: int) -> TaskModule:
        if depth != self.blocks and self._place is not None:
            container = task.get_submodule(self._place)
            for name in list(container._modules)[depth:]:
                del container._modules[name]
        return task


def _place_of(task: nn.Module, blocks: list[nn.Module]) -> str | None:
    """Return the name of the one list that holds all blocks, if they have equal shapes; None otherwise."""
    shapes = {(type(b), tuple((n, tuple(p.shape)) for n, p in b.named_parameters())) for b in blocks}
    for name, module in task.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and blocks and list(module.children()) == blocks:
            return name if len(shapes) == 1 else None
    return None


def _to_host(task: nn.Module, floats: torch.dtype | None) -> None:
    """Give every tensor a place in memory, shared ones once; inside a fake mode this takes none."""
    made: dict[int, Any] = {}
    for module in task.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    dtype = floats if floats is not None and tensor.is_floating_point() else tensor.dtype
                    new = torch.empty(tensor.shape, dtype=dtype)
                    made[id(tensor)] = (
                        nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                    )
                tensors[name] = made[id(tensor)]


def _quantities(f: Footprint, counter: OpCounter) -> Quantities:
    found: Quantities = {
        "parameters": f.parameters,
        "buffers": f.buffers,
        "gradients": f.gradients,
        "optimizer": f.optimizer,
        "activations": f.activations,
        "hidden": counter.hidden,
        "key values": counter.key_values,
        "loss": counter.loss,
        "narrow loss": counter.narrow,
        "block activations": counter.found["block activations"],
        "block flops": counter.found["block flops"],
    }
    for name in MOMENTS:
        moment = f.moments.get(name)
        found[f"rest {name}"] = f.rest(name) if moment else 0.0
        found[f"held {name}"] = moment.gradients if moment else 0.0
    for phase in PHASES:
        for kind in ("matmul", "attention", "bytes", "ops"):
            found[f"{kind} {phase}"] = counter.found[f"{kind} {phase}"]
    return found


def _line(points: Mapping[tuple[int, int], Quantities], depth: int) -> tuple[Quantities, Quantities]:
    """Return fixed part and slope over samples, at full depth."""
    sizes, depths = sorted({size for size, _ in points}), sorted({blocks for _, blocks in points})
    fixed, slope = {}, {}
    for name in next(iter(points.values())):
        deep = [_extended(depths, [points[size, blocks][name] for blocks in depths], depth) for size in sizes]
        slope[name] = (deep[-1] - deep[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else deep[0] / sizes[0]
        fixed[name] = deep[0] - sizes[0] * slope[name]
    return fixed, slope


def _extended(depths: list[int], values: list[float], depth: int) -> float:
    if len(depths) == 1:
        return values[0]
    return values[0] + (depth - depths[0]) * (values[1] - values[0]) / (depths[1] - depths[0])


def _part(batch: Any, size: int, samples: int) -> Any:
    return next(iter(RankLoader([batch], 0, max(1, size // samples), "train"))).batch


def _cast(batch: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, batch)


def _stack(recipe: Recipe, precision: str, remat: bool) -> dict[str, Mapping[str, Any]]:
    stack: dict[str, Mapping[str, Any]] = {n: o for n, o in recipe.plugins.items() if n not in APART}
    if precision == "amp":
        stack[AMP] = {"dtype": "bf16"}
    if remat:
        stack[REMAT] = {key: value for key, value in recipe.plugins.get(REMAT, {}).items() if key != "budget"}
    return stack


def _size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
