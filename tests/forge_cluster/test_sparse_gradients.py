"""Sparse gradients: ddp and zero's first stage average them; strategies that cannot refuse them by name."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_cluster.pipeline import Pipeline
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP
from tests.support.fitted import fitted
from tests.support.fsdp_kit import Deep, close, deep, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

PLUGINS: dict[str, Any] = {
    "ddp": DDP,
    "zero": Zero,
    "fsdp": FSDP,
    "pipeline": lambda: Pipeline(microbatches=2),
    "zero 2": lambda: Zero(stage=2),
}


class Looked(Deep):
    """Adds a row of a table with sparse gradients to every sample, and so to blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(x[:, 0].abs().long() % 5))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(name: str) -> dict[str, Any]:
    return fitted(deep(Looked), [PLUGINS[name]()] if "RANK" in os.environ else [], wide())


@pytest.mark.parametrize("name", some(["ddp", "zero"]))
def test_sparse_gradients_are_averaged(name: str) -> None:
    alone = fit(name)
    for rank in ranks(2)(fit, name):
        close(rank, alone)


@pytest.mark.parametrize("name", ["fsdp", "pipeline", "zero 2"])
def test_sparse_gradients_are_refused_with_the_cure(name: str) -> None:
    errors = ranks(2).errors(fit, name)
    assert all(errors)
    assert any(
        "those of table of Looked are sparse. Set sparse=False there. Or use -p ddp." in error for error in errors
    )
