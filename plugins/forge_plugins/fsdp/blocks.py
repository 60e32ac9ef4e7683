"""The blocks of a task that fsdp shards."""

from __future__ import annotations

from torch import nn

from forge.util.blocks import is_tied, repeated
from forge.util.patterns import chosen


def sharded_blocks(task: nn.Module, patterns: list[str], min_size: int) -> dict[str, nn.Module]:
    """Return the modules that match the patterns of fsdp.blocks, or the repeated blocks, if large enough.

    A block that shares a parameter with modules outside stays with its parent: tied parameters must be sharded
    together.
    """
    found = chosen(task, patterns, "fsdp.blocks") if patterns else repeated(task)
    sizes = {name: sum(parameter.numel() for parameter in block.parameters()) for name, block in found.items()}
    return {name: b for name, b in found.items() if sizes[name] >= max(1, min_size) and not is_tied(b, task)}
