"""Shard modules with torch's fully_shard, and restore them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule, fully_shard

from forge.errors import TaskError
from forge_plugins._patterns import listed
from forge_plugins._sharded import is_distributed, whole

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes that hold the hooks of fully_shard."""
MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that fully_shard sets on every module, for the compiler."""
COMPOSED = "__composable_api_state_key"
"""Prefix of the entries in a module's `__dict__` in which torch records applied APIs."""
TORCHS = "torch.distributed.fsdp"

Place = tuple[dict[str, nn.Parameter | None], str]
"""A parameter by the dictionary that holds it, and its name there."""


class Shards:
    """A task whose parameters are sharded module by module: `add` blocks, then the shell around them.

    torch replaces the task's parameters. The originals are kept, emptied, so that `remove` can restore them with the
    trained weights.
    """

    def __init__(self, task: nn.Module):
        self._task = task
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._own: list[tuple[nn.Parameter | None, list[Place]]] = []
        "The task's parameters, with all places of each: a tied one has several."
        self._sharded: set[int] = set()

    @property
    def modules(self) -> list[FSDPModule]:
        """The added modules, in order."""
        return [module for module, _ in self._classes if isinstance(module, FSDPModule)]

    def add(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Shard the parameters of a module that are not in a module added before, nor in `ignored_params`."""
        skipped = self._sharded | {id(parameter) for parameter in options.get("ignored_params", ())}
        own = [entry for key, entry in places_of(module).items() if key not in skipped]
        self._classes.append((module, type(module)))
        fully_shard(module, **options)
        self._sharded |= {id(parameter) for parameter in module.parameters()}
        for parameter, places in own:
            if is_distributed(parameter):  # tensor parallel: it cannot be restored
                self._own.append((None, places))
                continue
            owner, name = places[0]
            vars(owner[name]).update(vars(parameter))  # keep custom attributes of a parameter
            parameter.data = parameter.data.new_empty(0)
            self._own.append((parameter, places))

    def reshard(self) -> None:
        """Free gathered parameters of every module, so that none computes with outdated ones."""
        for module in self.modules:
            module.reshard()

    # -- without torch's hooks ----------------------------------------------------------------------------------------

    def remove_forward_hooks(self) -> None:
        """Leave it to `gather` and `reduce` when parameters are gathered and gradients divided: for a step that calls
        modules in an order of its own, and leaves them in the middle."""
        for state in self._states:
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()

    def gather(self) -> None:
        """Put whole parameters into all modules; a collective call, unless they are there."""
        self._states[-1]._lazy_init()  # as torch's hook of the outermost module would
        for module in self.modules:
            module.unshard()

    def reduce(self) -> None:
        """Average the gradients of whole parameters over the ranks, as those of shards, and free what was gathered."""
        groups = [state._fsdp_param_group for state in reversed(self._states) if state._fsdp_param_group is not None]
        for group in groups:
            group.post_backward()
        for group in groups:
            group._wait_for_post_backward()

    @property
    def _states(self) -> list[Any]:
        return [module._get_fsdp_state() for module in self.modules]

    def remove(self, gather: bool) -> None:
        """Remove the sharding. `gather`, on all ranks, restores the task's parameters with all weights; else the task
        keeps its shards."""
        self.reshard()
        if gather:
            for parameter, places in self._own:
                _give_back(parameter, places)
        for module, kind in self._classes:
            module.__class__ = kind
            _composable_state._module_state_mapping.pop(module, None)
        for module in self._task.modules():
            _clean(module)
        self.__init__(self._task)


def refuse_unshardable(task: nn.Module, who: str, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse parameters that torch cannot shard, by name; `who` divides them, each of the blocks as a unit."""
    named = list(task.named_parameters())
    scalars = [name for name, parameter in named if not parameter.ndim]
    if scalars:
        raise TaskError(
            f"{who} divides parameters along their first dimension, and {listed(scalars)} of {type(task).__name__} has "
            "none. Give it the shape (1,)."
        )
    odd = [name for name, parameter in named if not parameter.is_contiguous()]
    if odd:
        raise TaskError(
            f"{who} divides parameters that are contiguous in memory, and {listed(odd)} of {type(task).__name__} is "
            "not (channels_last, or a transposed view). Call .contiguous() on its data."
        )
    unit_of = {id(parameter): name for name, block in blocks.items() for parameter in block.parameters()}
    for unit in (*blocks, None):
        kinds: dict[torch.dtype, list[str]] = {}
        for name, parameter in named:
            if parameter.requires_grad and unit_of.get(id(parameter)) == unit:
                kinds.setdefault(parameter.dtype, []).append(name)
        if len(kinds) > 1:
            found = "; ".join(f"{str(kind).removeprefix('torch.')}: {listed(names)}" for kind, names in kinds.items())
            where = (
                f"outside of its blocks {type(task).__name__}" if unit is None else f"{unit} of {type(task).__name__}"
            )
            raise TaskError(
                f"{who} sends the trained parameters of a unit together, in one dtype, and {where} has several "
                f"({found}). Cast them to one, as in task.float(), or freeze those of the other dtype."
            )


def places_of(module: nn.Module) -> dict[int, tuple[nn.Parameter, list[Place]]]:
    """Return a module's parameters with all places of each, by id."""
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((inner._parameters, name))
    return found


def _give_back(own: nn.Parameter | None, places: list[Place]) -> None:
    """Restore a task's own parameter, with all weights."""
    owner, name = places[0]
    shard = owner[name]
    assert shard is not None
    values, trained = whole(shard), shard.requires_grad
    if own is None:
        own = nn.Parameter(values, requires_grad=trained)
    own.data = values
    own.requires_grad_(trained)
    for owner, name in places:
        owner[name] = own


def _clean(module: nn.Module) -> None:
    """Remove torch's hooks and marks from a module."""
    held = vars(module)
    for kind in HOOKS:
        hooks: dict[int, Any] = held.get(kind, {})
        for key in [key for key, hook in hooks.items() if _is_torchs(hook)]:
            for other in HOOKS if kind.startswith("_forward") else (kind,):
                held.get(other, {}).pop(key, None)
    for mark in MARKS:
        held.pop(mark, None)
    for key in [key for key in held if key.startswith(COMPOSED)]:
        for applied in [a for a in held[key] if getattr(a, "__name__", a) == fully_shard.__name__]:
            del held[key][applied]
        if not held[key]:
            del held[key]


def _is_torchs(hook: Any) -> bool:
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(TORCHS)
