"""A part of a task with its averaged weights: a target network, a mean teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge.distributed.shards import COMPOSED, Place
from forge.optim.sharded import whole
from forge.snapshot.copies import without_hooks

if TYPE_CHECKING:
    from forge_plugins.averaging.average import Average


class Target:
    """A copy of a part of the task, without gradients, that has the averaged weights in place of its own.

    What is averaged in the dtype of the weights shares the average's memory. Everything else is copied after each
    update: an average in float32 of weights in bf16, buffers, and the weights themselves before there is an average.
    """

    def __init__(self, average: Average, name: str):
        self.average, self.part = average, average.task.get_submodule(name)
        self.names = _names_in(average.task, self.part)
        with torch.inference_mode(False):  # it may be made in an evaluation, and is used in training
            self.twin = self._copied()
        self.bind()

    def _copied(self) -> nn.Module:
        twin = without_hooks(self.part).requires_grad_(False)
        for module in twin.modules():
            vars(module).pop("_compiled_call_impl", None)
        self.own = {name: parameter.data.clone() for name, parameter in twin.named_parameters()}
        return twin

    def bind(self) -> None:
        """Find what is averaged now."""
        self._behind: list[tuple[torch.Tensor, torch.Tensor]] = []
        live = dict(self.part.named_parameters())
        for name, mine in self.twin.named_parameters():
            source = self.average.tensors.get(self.names[name])
            if source is not None and source.dtype is mine.dtype:
                mine.data = source
            else:
                mine.data = self.own[name]
                self._behind.append((mine, live[name] if source is None else source))

    @torch.no_grad()
    def refresh(self) -> None:
        """Come up to date, once an update has changed weights and buffers."""
        for mine, source in self._behind:
            mine.copy_(source)
        averaged, live = self.average.tensors, dict(self.part.named_buffers())
        for name, mine in self.twin.named_buffers():
            mine.copy_(averaged.get(self.names[name], live.get(name, mine)))

    def in_modes(self) -> nn.Module:
        """Return the copy, each module in the mode of the part's."""
        for mine, own in zip(self.twin.modules(), self.part.modules(), strict=True):
            mine.training = own.training
        return self.twin


class ShardedTarget(Target):
    """A copy of a part that FSDP shards. As there, a block has weights while it runs; what is in no block has them from
    the moment that a step asks until its update."""

    def _copied(self) -> nn.Module:
        part, empty = self.part, torch.empty(0)
        kinds = {module: type(module) for module in part.modules() if isinstance(module, FSDPModule)}
        memo: dict[int, Any] = {id(p): nn.Parameter(empty, requires_grad=False) for p in part.parameters()}
        named = {id(memo[id(p)]): self.names[name] for name, p in part.named_parameters()}
        for module in part.modules():
            memo |= {id(state): {} for key, state in vars(module).items() if key.startswith(COMPOSED)}
        try:
            for module, kind in kinds.items():
                module.__class__ = kind.__bases__[1]  # torch refuses to copy its own
            twin = without_hooks(part, memo)
        finally:
            for module, kind in kinds.items():
                module.__class__ = kind
        blocks = [path for path, module in part.named_modules(remove_duplicate=False) if path and module in kinds]
        units: dict[str, dict[str, list[Place]]] = {path: {} for path in ("", *blocks)}
        for path, module in twin.named_modules(remove_duplicate=False):
            inside = max((block for block in blocks if f"{path}.".startswith(f"{block}.")), key=len, default="")
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    units[inside].setdefault(named[id(parameter)], []).append((module._parameters, key))
        self._outer, self._is_gathered = units.pop(""), False
        for path, unit in units.items():
            block = twin.get_submodule(path)
            block.register_forward_pre_hook(lambda *_, unit=unit: self._gather(unit))
            block.register_forward_hook(lambda *_, unit=unit: _free(unit), always_call=True)
        return twin

    def bind(self) -> None:
        """What is averaged is looked up when it is gathered."""
        self._behind = []

    def refresh(self) -> None:
        _free(self._outer)
        self._is_gathered = False
        super().refresh()

    def in_modes(self) -> nn.Module:
        if not self._is_gathered:
            self._gather(self._outer)
            self._is_gathered = True
        return super().in_modes()

    @torch.no_grad()
    def _gather(self, unit: Mapping[str, list[Place]]) -> None:
        average = self.average
        for name, places in unit.items():
            source = average.tensors.get(name, average.sharded[name])
            values = whole(source).to(average.device, average.dtype or average.sharded[name].dtype)
            for owner, key in places:
                owner[key] = nn.Parameter(values, requires_grad=False)


def _free(unit: Mapping[str, list[Place]]) -> None:
    for places in unit.values():
        for owner, key in places:
            owner[key] = nn.Parameter(torch.empty(0), requires_grad=False)


def _names_in(task: nn.Module, part: nn.Module) -> dict[str, str]:
    """Return the task's names of a part's parameters and buffers, by the part's names: of what is there twice, the
    task has the first."""
    known = {id(parameter): name for name, parameter in task.named_parameters()}
    paths = {id(module): f"{path}." if path else "" for path, module in task.named_modules()}
    buffers = {
        f"{path}.{key}".lstrip("."): paths[id(module)] + key
        for path, module in part.named_modules()
        for key in module._buffers
    }
    return {**{name: known[id(parameter)] for name, parameter in part.named_parameters()}, **buffers}
