"""Cut a task into stages by its blocks, and give back what was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.errors import RecipeError, TaskError
from forge.optim.sharded import is_distributed, whole
from forge.util.blocks import repeated


def blocks_of(task: nn.Module, split: Sequence[str]) -> dict[str, nn.Module]:
    """Return the blocks that stages are made of: the children of the container with the names in `split`, else of the
    container of repeated blocks, or the Sequential, with the most parameters."""
    modules = dict(task.named_modules())
    if split:
        missing = [name for name in split if name not in modules]
        parents = {name.rpartition(".")[0] for name in split}
        if missing or len(parents) != 1:
            why = f"{missing[0]!r} is no module" if missing else "they are in several containers"
            raise RecipeError(f"pipeline.split names the blocks that begin a stage, in one Sequential or list: {why}.")
        containers = parents
    else:
        containers = {name.rpartition(".")[0] for name in repeated(task)}
        containers |= {name for name, module in modules.items() if isinstance(module, nn.Sequential)}
    if not containers:
        raise TaskError(
            f"pipeline: {type(task).__name__} has neither repeated blocks in a ModuleList nor a Sequential to cut. Put "
            "its layers into one."
        )
    sizes = {name: sum(p.numel() for p in modules[name].parameters()) for name in modules if name in containers}
    where = max(sizes, key=lambda name: sizes[name])  # of equal ones the first, on every rank
    return {f"{where}.{name}".strip("."): block for name, block in modules[where].named_children()}


def bounds_of(blocks: dict[str, nn.Module], stages: int, split: Sequence[str]) -> list[int]:
    """Return the number of the first block of every stage, and the number of blocks."""
    names = list(blocks)
    if split:
        begins = [names.index(name) for name in split]
        if len(begins) != stages - 1 or begins != sorted(set(begins)) or begins[0] == 0:
            raise RecipeError(
                f"pipeline.split needs {stages - 1} blocks in their order, without the first, to make {stages} stages; "
                f"it has {', '.join(split)}."
            )
        return [0, *begins, len(names)]
    if len(names) < stages:
        raise TaskError(
            f"pipeline: {len(names)} blocks ({names[0]}, ...) cannot make {stages} stages. Use fewer ranks or another "
            "schedule, or name blocks of a larger container in pipeline.split."
        )
    sizes = [1 + sum(p.numel() for p in block.parameters()) for block in blocks.values()]
    bounds, done = [0], 0
    for number, size in enumerate(sizes):
        left = stages - len(bounds)
        middle = done + size / 2
        if number and left and (middle >= sum(sizes) * len(bounds) / stages or len(names) - number <= left):
            bounds.append(number)
        done += size
    return [*bounds, len(names)]


class Cutting:
    """The tensors of blocks that other ranks hold: taken out of the task, and put back with their values."""

    def __init__(self, task: nn.Module, blocks: dict[str, nn.Module], stage_of: Sequence[int], ranks: Sequence[int]):
        self._refuse_shared(task, blocks, stage_of)
        self._blocks = [(block, ranks[stage]) for block, stage in zip(blocks.values(), stage_of, strict=True)]
        self._own: list[tuple[dict[str, Any], str, Tensor | None, int]] = []
        "Places, with the task's own tensor; None: it is divided by layers, and a new one takes its place."

    @staticmethod
    def _refuse_shared(task: nn.Module, blocks: dict[str, nn.Module], stage_of: Sequence[int]) -> None:
        home = {id(p): s for block, s in zip(blocks.values(), stage_of, strict=True) for p in block.parameters()}
        inside = {id(m) for block in blocks.values() for m in block.modules()}
        named = [(name, p, -1) for name, p in task.named_parameters(remove_duplicate=False)]
        outside = {
            id(p) for m in task.modules() if id(m) not in inside for p in m._parameters.values() if p is not None
        }
        for block, stage in zip(blocks.values(), stage_of, strict=True):
            named += [("", p, stage) for p in block.parameters()]
        for _, parameter, stage in named:
            if stage >= 0 and (home[id(parameter)] != stage or id(parameter) in outside):
                name = next(name for name, p, _ in named if p is parameter)
                raise TaskError(
                    f"pipeline: {name} is shared by blocks of two stages. Give each its own, or cut elsewhere."
                )

    def take_out(self, rank: int) -> None:
        """Replace the tensors of other ranks' blocks by ones without memory."""
        for block, owner in self._blocks:
            for module in block.modules():
                for place in (module._parameters, module._buffers):
                    for name, tensor in place.items():
                        if tensor is not None:
                            own = None if is_distributed(tensor) else tensor
                            self._own.append((place, name, own, owner))  # pyright: ignore[reportArgumentType]
                            if owner != rank:
                                place[name] = _without_memory(tensor)  # pyright: ignore[reportArgumentType]
                                if own is not None:
                                    own.data = own.data.new_empty(0)

    def whole(self, group: dist.ProcessGroup, device: torch.device) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Return all values by place, from the ranks that hold them; a collective call over the pipeline."""
        found = []
        for place, name, _, owner in self._own:
            tensor = place[name].detach()
            if tensor.is_meta:
                tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            tensor = whole(tensor)
            dist.broadcast(tensor, group=group, group_src=owner)
            found.append((place, name, tensor))
        return found

    def put_back(self, group: dist.ProcessGroup, device: torch.device) -> None:
        for (place, name, own, _), (_, _, values) in zip(self._own, self.whole(group, device), strict=True):
            flags = place[name].requires_grad
            if own is None:
                own = nn.Parameter(values)
            own.data = values
            place[name] = own.requires_grad_(flags)
        self._own = []


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")  # plain, if divided
    if not isinstance(tensor, nn.Parameter):
        return empty
    made = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made
