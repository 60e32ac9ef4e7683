"""Copies of a task for probes: they carry none of the user's hooks, which would otherwise notice every probe."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from forge.util.frozen import every_module

Module = TypeVar("Module", bound=nn.Module)
_LEFT_OUT = object()


def without_hooks(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Return a deep copy without hooks, but for those that make torch's layers work, as that of a weight norm.

    `memo` holds what stands for an object in the copy, as that of `copy.deepcopy` does.
    """
    memo = {} if memo is None else memo
    others = {id(hook) for hooks in _registries(module) for hook in hooks.values() if not _is_torchs(hook)}
    memo |= dict.fromkeys(others, _LEFT_OUT)
    twin = copy.deepcopy(module, memo)
    for hooks in _registries(twin):  # since Python 3.14 a function stays itself, whatever the memo has in its place
        for key in [key for key, hook in hooks.items() if hook is _LEFT_OUT or id(hook) in others]:
            del hooks[key]
    return twin


def _registries(module: nn.Module) -> Iterator[dict[int, Any]]:
    for part in every_module(module):
        yield from (hooks for name, hooks in vars(part).items() if name.endswith("_hooks") and isinstance(hooks, dict))


def _is_torchs(hook: Any) -> bool:
    """Whether a hook belongs to a layer of torch's; those of its strategies would call other ranks."""
    hook = getattr(hook, "hook", hook)  # torch wraps those of load_state_dict
    owner = hook if hasattr(hook, "__code__") else type(hook)
    return str(getattr(owner, "__module__", "")).startswith("torch.nn.")
