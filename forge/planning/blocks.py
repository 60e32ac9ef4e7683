"""Repeated blocks: the modules that a sharding strategy gathers one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from forge.util import blocks


def block_bytes(task: nn.Module) -> tuple[int, int]:
    """Return the bytes of the largest repeated block, and of all parameters outside such blocks."""
    found = repeated(task)
    inside = {id(parameter) for block in found for parameter in block.parameters()}
    outside = [parameter for parameter in task.parameters() if id(parameter) not in inside]
    return max((size(block.parameters()) for block in found), default=0), size(outside)


def repeated(task: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks."""
    return list(blocks.repeated(task).values())


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
