"""What the tests of meshes share: a task that can be divided along every axis, and a fit on a mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.pipeline import Pipeline
from forge_plugins import EMA, FSDP, Accumulate, Clip, Schedule
from forge_plugins.tensor_parallel import TensorParallel
from tests.support.fitted import fitted

WORDS, WIDTH, HEADS, HIDDEN, LENGTH = 12, 8, 4, 16, 8
PLAN: Any = {
    "embed": "gather",
    "blocks.*.[qkv]": "column",
    "blocks.*.o": "row",
    "blocks.*.fc1": "column",
    "blocks.*.fc2": "row",
    "blocks.*.norm1": "sequence",
    "last": "replicate",
    "head": "gather",
}


class MeshBlock(nn.Module):
    """A transformer block that does not count its heads."""

    heads = -1

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            part(y).view(batch, length, self.heads, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(mixed.reshape(batch, length, -1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class MeshWords(forge.TaskModule):
    """The next of twelve words, whose places are learned; a number without a dimension scales the logits."""

    block = MeshBlock

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        h = self.embed(x) + self.places(forge.positions(x))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.last(h)) * self.scale
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "size": logits.detach().square().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def sentences(seed: int = 0, sizes: tuple[int, ...] = (8, 6, 8, 3)) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(WORDS, (size, LENGTH + 1), generator=generator) for size in sizes]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in drawn]


def strategies(mesh: Mapping[str, int], **options: Any) -> list[Any]:
    """The plugins of a mesh, without sizes of their own."""
    blocks: list[Any] = [Pipeline(microbatches=2, **options)] if "pipe" in mesh else [FSDP(**options)]
    return [
        *blocks,
        *([ContextParallel()] if "context" in mesh else []),
        *([TensorParallel(plan=PLAN)] if "tensor" in mesh else []),
    ]


def levers() -> list[Any]:
    return [Accumulate(2), Clip(0.05), EMA(0.9), Schedule("linear")]


def fit_mesh(
    mesh: Mapping[str, int],
    plugins: list[Any],
    task: type[MeshWords] = MeshWords,
    several: list[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit; on several ranks with the strategies of the mesh. Weights, metrics, and bytes that this rank held."""
    several = (several or strategies(mesh)) if "RANK" in os.environ and mesh else []
    stack, sizes = [*plugins, *several], dict(mesh) if several else None
    return fitted(task(), stack, sentences(), sentences(1, (5,)), **{"max_epochs": 1, "mesh": sizes, **options})


def fit_levers(mesh: Mapping[str, int]) -> dict[str, Any]:
    return fit_mesh(mesh, levers())
