"""Modules and layers of a task: which can have hooks, and the layer of a parameter."""

from __future__ import annotations

import functools

import torch
from torch import nn


def watchable(task: nn.Module, model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """Return the modules on which a forward hook is called and changes nothing, and the names of compiled ones.

    Compiled code does not call hooks; a TransformerEncoderLayer in evaluation mode leaves its fast path, and changes
    its bits, when it or a part of it has one. Modules inside of either are left out.
    """
    if is_compiled(model):
        return [], [""]
    found: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    closed: list[str] = []
    for name, module in task.named_modules():
        if any(name == above or name.startswith(f"{above}.") for above in closed):
            continue
        if is_compiled(module):
            if not name:
                return [], [""]
            compiled.append(name)
            closed.append(name)
        elif isinstance(module, torch.jit.ScriptModule) or (
            isinstance(module, nn.TransformerEncoderLayer) and not module.training  # it has a fast path
        ):
            closed.append(name)
        else:
            found.append((name, module))
    return found, compiled


def is_compiled(module: nn.Module) -> bool:
    """Whether compiled by `module.compile()`, or the wrapper that `torch.compile(module)` returns."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


@functools.cache
def layer_of(parameter: str) -> str:
    """Return the module of a parameter; for a parameter of the task itself, its own name."""
    layer, parametrized, _ = parameter.partition(".parametrizations.")
    return layer if parametrized else parameter.rpartition(".")[0] or parameter
