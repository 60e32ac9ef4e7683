"""Repeated blocks of a task."""

from __future__ import annotations

from collections import Counter

from torch import nn

from forge_plugins.common.patterns import chosen


def repeated(task: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks by name: modules of one class, with layers in them, in one container."""
    blocks: dict[str, nn.Module] = {}
    for name, module in task.named_modules():
        if any(name.startswith(f"{block}.") or name == block for block in blocks):
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            kinds = Counter(type(child) for child in module.children())
            blocks |= {
                f"{name}.{child}": block
                for child, block in module.named_children()
                if kinds[type(block)] > 1 and _is_block(block)
            }
    return blocks


def _is_block(module: nn.Module) -> bool:
    has_layers = any(next(child.parameters(), None) is not None for child in module.children())
    return has_layers and type(module).forward is not nn.Module.forward


def sharded_blocks(task: nn.Module, patterns: list[str], min_size: int) -> dict[str, nn.Module]:
    """Return the modules that match the patterns of fsdp.blocks, or the repeated blocks, if large enough.

    A block that shares a parameter with modules outside stays with its parent: tied parameters must be sharded
    together.
    """
    found = chosen(task, patterns, "fsdp.blocks") if patterns else repeated(task)
    sizes = {name: sum(parameter.numel() for parameter in block.parameters()) for name, block in found.items()}
    return {name: b for name, b in found.items() if sizes[name] >= max(1, min_size) and not is_tied(b, task)}


def is_tied(block: nn.Module, task: nn.Module) -> bool:
    """Whether modules outside of a block have a parameter of it; those without a dimension are not sharded, so that
    they do not count."""
    everything = list(task.named_modules(remove_duplicate=False))
    inside = tuple(f"{name}." for name, module in everything if module is block)
    outside = [module for name, module in everything if not f"{name}.".startswith(inside)]
    own = {id(parameter) for parameter in block.parameters() if parameter.ndim}
    return any(id(parameter) in own for module in outside for parameter in module._parameters.values())
