"""Modules that keep statistics of what passes through them: what `freeze` must hold still."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def with_statistics(task: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """BatchNorm and its kin, by name: every module with a buffer `running_...` of its own."""
    for name, module in task.named_modules():
        if any(key.startswith("running_") and buffer is not None for key, buffer in module._buffers.items()):
            yield name, module
