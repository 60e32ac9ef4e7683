"""Shard modules with torch's fully_shard, and restore them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from forge import registry
from forge.errors import TaskError
from forge.optim.sharded import is_distributed, whole
from forge.torch_internals import module_states
from forge.util.blocks import is_tied
from forge.util.patterns import listed

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
        self.used: set[int] = set()
        "Ids of the parameters that had a gradient of this rank when it was averaged; cleared by the reader."
        self.called: list[int] = []
        "Added modules by number, in the order in which this rank has called them; cleared by the reader."

    def note_use(self) -> None:
        """Note which parameters have a gradient on this rank, from now on. Others count as zeros, where torch can: else
        torch would average the gradients of different parameters."""
        for number, (module, state) in enumerate(zip(self.modules, self._states, strict=True)):
            group = state._fsdp_param_group
            if group is not None:
                group.pre_forward = functools.partial(self._called, number, group.pre_forward)
                group.post_backward = functools.partial(self._noted, group, group.post_backward)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.15
                module.set_reduce_scatter_unused_params(True, recurse=False)

    def _called(self, number: int, pre_forward: Any, *given: Any) -> Any:
        if torch.is_grad_enabled():
            self.called.append(number)
        return pre_forward(*given)

    def _noted(self, group: Any, post_backward: Any, *unused: Any) -> None:
        if group.reduce_grads:
            for each in group.fsdp_params:
                whole = getattr(each, "unsharded_param", None)
                if each.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                    self.used.add(id(each.sharded_param))
        post_backward(*unused)

    @property
    def divided(self) -> set[int]:
        """The ids of the parameters that are divided here."""
        groups = [group for state in self._states if (group := state._fsdp_param_group) is not None]
        return {id(each.sharded_param) for group in groups for each in group.fsdp_params}

    @property
    def modules(self) -> list[FSDPModule]:
        """The added modules, in order."""
        return [module for module, _ in self._classes if isinstance(module, FSDPModule)]

    def add(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Shard the parameters of a module that are not in a module added before, nor in `ignored_params`. Those
        without a dimension stay whole; their gradients are averaged by the caller. Inner modules whose parameters have
        another type are separate units: torch gathers those of one type together."""
        scalars = {parameter for parameter in module.parameters() if not parameter.ndim}
        left = scalars | set(options.get("ignored_params", ()))
        ignored = {id(parameter) for parameter in left}
        for inner in _of_other_types(module, self._task, self._sharded | ignored):
            self.add(inner, options)
        skipped = self._sharded | ignored
        own = [entry for key, entry in places_of(module).items() if key not in skipped]
        self._classes.append((module, type(module)))
        fully_shard(module, **{**options, "ignored_params": left or None})
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
            module_states.pop(module, None)
        for module in self._task.modules():
            _clean(module)
        self.__init__(self._task)


def refuse_unshardable(task: nn.Module, who: str) -> None:
    """Refuse parameters that torch cannot shard, by name; `who` divides them."""
    named = list(task.named_parameters())
    scalars = [name for name, parameter in named if not parameter.ndim and is_distributed(parameter)]
    empty = [name for name, parameter in named if not parameter.numel()]
    odd = [name for name, parameter in named if not parameter.is_contiguous()]
    for names, why in (
        (
            scalars,
            "has no dimension, and is in a layer that is divided."
            + registry.advice("divided", " Leave that layer out of {}: every rank then computes it whole."),
        ),
        (empty, "has no elements, and torch's FSDP takes no such parameter. Remove it, or make it a buffer."),
        (
            odd,
            "is not contiguous in memory (a transposed view, or channels last). Call .contiguous() on its data.",
        ),
    ):
        if names:
            raise TaskError(f"{who}: {listed(names)} of {type(task).__name__} {why}")


def _of_other_types(module: nn.Module, task: nn.Module, skipped: set[int]) -> list[nn.Module]:
    """Return the inner modules whose trained parameters have another type than most of the module's; refuse a module
    with several types of its own."""
    own = {
        id(inner): [p for p in inner._parameters.values() if p is not None and p.requires_grad and id(p) not in skipped]
        for inner in module.modules()
    }
    sizes: Counter[torch.dtype] = Counter()
    for parameter in {p for held in own.values() for p in held}:
        sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    main = sizes.most_common(1)[0][0]
    found = []
    for name, inner in module.named_modules():
        types = {parameter.dtype for parameter in own[id(inner)]} - {main}
        shown = " and ".join(sorted(str(each).removeprefix("torch.") for each in {main, *types}))
        if types and (len(types) > 1 or any(p.dtype is main for p in own[id(inner)]) or is_tied(inner, task)):
            raise TaskError(
                f"Parameters of {name or type(module).__name__} ({type(inner).__name__}) are {shown}: "
                "torch's FSDP shards those of one type together. Give them one, as task.to(torch.float32) does."
            )
        if types and inner is not module:
            found.append(inner)
    return found


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
