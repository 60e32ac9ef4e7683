"""Layers with sparse gradients."""

from __future__ import annotations

from torch import nn

from forge import registry
from forge.errors import TaskError
from forge.util.patterns import listed


def refuse_sparse(task: nn.Module, who: str) -> None:
    """Refuse trained layers with sparse gradients, by name; `who` sums gradients of many parameters as one tensor."""
    names = [
        name
        for name, module in task.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]
    if names:
        raise TaskError(
            f"{who} sums the gradients of many parameters as one tensor, and those of {listed(names)} of "
            f"{type(task).__name__} are sparse. Set sparse=False there." + registry.advice("sparse", " Or use {}.")
        )
