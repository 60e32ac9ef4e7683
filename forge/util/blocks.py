"""Repeated blocks of a task."""

from __future__ import annotations

from collections import Counter

from torch import nn


def repeated(task: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks by name: modules of one class, with layers in them, in one container."""
    blocks: dict[str, nn.Module] = {}
    below: set[int] = set()
    for name, module in task.named_modules():
        if id(module) in below or not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        kinds = Counter(type(child) for child in module.children())
        for child, block in module.named_children():
            if kinds[type(block)] > 1 and _is_block(block):
                blocks[f"{name}.{child}".lstrip(".")] = block
                below |= {id(inner) for inner in block.modules()}
    return blocks


def _is_block(module: nn.Module) -> bool:
    has_layers = any(next(child.parameters(), None) is not None for child in module.children())
    return has_layers and type(module).forward is not nn.Module.forward


def is_tied(block: nn.Module, task: nn.Module) -> bool:
    """Whether modules outside of a block have a parameter of it; those without a dimension are not sharded, so that
    they do not count."""
    everything = list(task.named_modules(remove_duplicate=False))
    inside = tuple(f"{name}." for name, module in everything if module is block)
    outside = [module for name, module in everything if not f"{name}.".startswith(inside)]
    own = {id(parameter) for parameter in block.parameters() if parameter.ndim}
    return any(id(parameter) in own for module in outside for parameter in module._parameters.values())
