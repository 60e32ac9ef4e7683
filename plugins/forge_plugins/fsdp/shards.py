"""Shards: modules under torch's fully_shard, and the way back to what they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
"""Where a module keeps the hooks that fully_shard sets."""
MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What fully_shard writes into every module, for the compiler to see."""
COMPOSED = "__composable_api_state_key"
"""How the entries in a module's `__dict__` begin in which torch notes what was applied to it."""
TORCHS = "torch.distributed.fsdp"

Place = tuple[dict[str, nn.Parameter | None], str]
"""A parameter by the dictionary that holds it, and its name there."""


class Shards:
    """A task whose parameters are divided among ranks, module by module: `add` blocks, then the shell around them.

    torch puts other parameters in the place of a task's own. Those are kept, emptied, so that `remove` can give the
    task its own back, filled with what was trained.
    """

    def __init__(self, task: nn.Module):
        self._task = task
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._own: list[tuple[nn.Parameter | None, list[Place]]] = []
        "The task's parameters, and all places where each stood: one that is tied has several."
        self._sharded: set[int] = set()

    @property
    def modules(self) -> list[FSDPModule]:
        """What was added, in that order."""
        return [module for module, _ in self._classes if isinstance(module, FSDPModule)]

    def add(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Shard what is in a module and not in one that was added before."""
        own = [entry for key, entry in _places(module).items() if key not in self._sharded]
        self._classes.append((module, type(module)))
        fully_shard(module, **options)
        self._sharded |= {id(parameter) for parameter in module.parameters()}
        for parameter, places in own:
            if is_distributed(parameter):  # tensor parallel: it cannot become whole again
                self._own.append((None, places))
                continue
            owner, name = places[0]
            vars(owner[name]).update(vars(parameter))  # what somebody noted on a parameter goes with it
            parameter.data = parameter.data.new_empty(0)
            self._own.append((parameter, places))

    def reshard(self) -> None:
        """Have every module hold its shard alone, so that none computes with what was gathered before."""
        for module in self.modules:
            module.reshard()

    def remove(self, gather: bool) -> None:
        """Take everything off again. `gather`, on all ranks, gives the task its own parameters with all of the weights;
        else it is left with its shards."""
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


def refuse_unshardable(task: nn.Module) -> None:
    """What torch cannot divide is refused by name."""
    named = list(task.named_parameters())
    scalars = [name for name, parameter in named if not parameter.ndim]
    if scalars:
        raise TaskError(
            f"fsdp divides parameters along their first dimension, and {listed(scalars)} of {type(task).__name__} has "
            "none. Give it the shape (1,)."
        )
    odd = [name for name, parameter in named if not parameter.is_contiguous()]
    if odd:
        raise TaskError(
            f"fsdp divides parameters that are contiguous in memory, and {listed(odd)} of {type(task).__name__} is not "
            "(channels_last, or a transposed view). Call .contiguous() on its data."
        )


def _places(module: nn.Module) -> dict[int, tuple[nn.Parameter, list[Place]]]:
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((inner._parameters, name))
    return found


def _give_back(own: nn.Parameter | None, places: list[Place]) -> None:
    """Put a task's own parameter back, with all of the weights."""
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
    """Take torch's hooks and marks off a module."""
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
