"""What the tests of expert_parallel share: a mixture of experts by hand, one of transformers, and a fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge_cluster.expert_parallel import ExpertParallel
from forge_plugins import DDP, FSDP
from tests.support.fitted import fitted

WORDS, WIDTH, HIDDEN, LENGTH, EXPERTS = 12, 8, 6, 5, 4


class Experts(nn.Module):
    """Two layers for each expert, one expert after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 2)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            rows, place = torch.where(chosen == expert)
            hidden = F.gelu(F.linear(tokens[rows], self.up[expert]))
            made = F.linear(hidden, self.down[expert], self.bias[expert])
            output = output.index_add(0, rows, (made * weights[rows, place, None]).to(output.dtype))
        return output


class Mixture(nn.Module):
    """A router and its experts, added to their input."""

    def __init__(self, choices: int):
        super().__init__()
        self.choices, self.norm = choices, nn.LayerNorm(WIDTH)
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.choices)
        return x + self.experts(tokens, chosen, weights).view_as(x)


class Mixed(forge.TaskModule):
    """The next of twelve words by two mixtures; the second one's router is tilted, so that few experts are chosen."""

    blocks: Any

    def __init__(self, choices: int = 2, tilt: float = 0.0):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Mixture(choices) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()
        with torch.no_grad():
            self.blocks[1].gate.bias[:2] += tilt

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h) * self.scale

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "size": logits.detach().square().mean()}

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def words(seed: int = 0, sizes: Sequence[int] = (8, 6, 8, 3)) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(WORDS, (size, LENGTH + 1), generator=generator) for size in sizes]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in drawn]


def several(mesh: Mapping[str, int]) -> list[Any]:
    """The plugins of a mesh: with `shard`, of any size, fsdp."""
    return [FSDP() if "shard" in mesh else DDP(), ExpertParallel()]


def fit_experts(
    mesh: Mapping[str, int],
    plugins: Sequence[Any] = (),
    task: forge.TaskModule | None = None,
    data: list[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit; on several ranks with the strategies of the mesh. Weights, metrics, and bytes that this rank held."""
    many = "RANK" in os.environ and bool(mesh)
    stack = [*plugins, *(several(mesh) if many else ())]
    logged: dict[str, list[float]] = {}

    @forge.on("log")
    def note(metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if name.startswith(("experts/", "grad_norm")):
                logged.setdefault(name, []).append(float(value))

    options = {"max_epochs": 1, "log_every": 1, "mesh": dict(mesh) if many else None, **options}
    found = fitted(task or Mixed(), [*stack, note], data or words(), words(1, (5,)), **options)
    return {**found, "logged": logged}
