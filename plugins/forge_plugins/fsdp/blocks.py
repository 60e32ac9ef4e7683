"""The modules that are separate units of sharding."""

from __future__ import annotations

from torch import nn

from forge_plugins._blocks import repeated
from forge_plugins._patterns import chosen


def blocks_of(task: nn.Module, patterns: list[str], min_size: int) -> dict[str, nn.Module]:
    """Return the modules that match the patterns, or the repeated blocks, if large enough.

    A block that shares a parameter with modules outside stays with its parent: tied parameters must be sharded
    together.
    """
    found = chosen(task, patterns, "fsdp.blocks") if patterns else repeated(task)
    return {name: block for name, block in found.items() if _is_large(block, min_size) and not _is_tied(block, task)}


def _is_large(block: nn.Module, min_size: int) -> bool:
    return sum(parameter.numel() for parameter in block.parameters()) >= max(1, min_size)


def _is_tied(block: nn.Module, task: nn.Module) -> bool:
    everything = list(task.named_modules(remove_duplicate=False))
    inside = tuple(f"{name}." for name, module in everything if module is block)
    outside = [module for name, module in everything if not f"{name}.".startswith(inside)]
    own = {id(parameter) for parameter in block.parameters()}
    return any(id(parameter) in own for module in outside for parameter in module._parameters.values())
