"""The modules that are separate units of sharding."""

from __future__ import annotations

from torch import nn

from forge_plugins.common.blocks import is_tied, repeated
from forge_plugins.common.patterns import chosen


def blocks_of(task: nn.Module, patterns: list[str], min_size: int) -> dict[str, nn.Module]:
    """Return the modules that match the patterns, or the repeated blocks, if large enough.

    A block that shares a parameter with modules outside stays with its parent: tied parameters must be sharded
    together.
    """
    found = chosen(task, patterns, "fsdp.blocks") if patterns else repeated(task)
    return {name: block for name, block in found.items() if _is_large(block, min_size) and not is_tied(block, task)}


def _is_large(block: nn.Module, min_size: int) -> bool:
    return sum(parameter.numel() for parameter in block.parameters()) >= max(1, min_size)
