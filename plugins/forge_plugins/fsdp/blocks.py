"""Which modules are sharded each for itself."""

from __future__ import annotations

from torch import nn

from forge_plugins._blocks import repeated
from forge_plugins._patterns import chosen


def blocks_of(task: nn.Module, patterns: list[str], min_size: int) -> dict[str, nn.Module]:
    """The modules that the patterns name, or the blocks that the task repeats, where they are large enough.

    A block that shares a parameter with what is outside of it stays with its parent: what is tied must be sharded
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
