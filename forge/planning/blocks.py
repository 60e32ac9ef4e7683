"""Repeated blocks: the modules that a sharding strategy gathers one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn


def block_bytes(task: nn.Module) -> tuple[int, int]:
    """Return the bytes of the largest repeated block, and of all parameters outside such blocks."""
    blocks = repeated(task)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [parameter for parameter in task.parameters() if id(parameter) not in inside]
    return max((size(block.parameters()) for block in blocks), default=0), size(outside)


def repeated(task: nn.Module) -> list[nn.Module]:
    """Return modules of one class, with layers inside, in one list or sequence; outermost ones only."""
    found: list[nn.Module] = []
    below: set[int] = set()
    for module in task.modules():
        if id(module) in below or not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        kinds = Counter(type(child) for child in module.children())
        for child in module.children():
            if kinds[type(child)] > 1 and _has_layers(child):
                found.append(child)
                below |= {id(inner) for inner in child.modules()}
    return found


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _has_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())
