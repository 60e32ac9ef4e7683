"""Recipes, small, and an LSTM over sequences of any length: each export is verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge

SMALL = {
    "fashion_cnn": ["task.widths=[8,16]", "task.depths=[0,1]"],
    "fashion_mlp": [],
    "finetune": [],
    "gan_digits": [],
    "gpt2_124m": ["task.layers=2", "task.width=64", "task.heads=4", "data.window=32", "data.samples=192"],
    "mlp": [],
    "multilabel": ["data.train=200", "data.val=50"],
    "quickstart": [],
    "regression": [],
    "resnet18": [],
    "sentiment": ["data.train=200", "data.val=300"],
    "shakespeare_char": ["task.layers=2", "task.width=64", "task.heads=4", "data.window=32"],
}
"""Recipes with a task, and the overrides that make each small."""


class Recurrent(forge.TaskModule):
    """Two layers of LSTM and a linear layer over the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.head(self.lstm(sequence)[0][:, -1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}


def made(name: str) -> tuple[forge.TaskModule, Any]:
    """Return a task with its validation data."""
    torch.manual_seed(0)
    if name == "LSTM, lengths vary":
        return Recurrent().eval(), [(torch.randn(4, length, 8), torch.arange(4)) for length in (16, 9, 12)]
    recipe = forge.recipe(name, SMALL[name], remove=list(forge.recipe(name).plugins))
    task, data = forge.Trainer(recipe=recipe, run_dir=False).build()
    return task.eval(), data.val


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx", "aoti", "torchscript"])
@pytest.mark.parametrize("name", [*SMALL, "LSTM, lengths vary"])
def test_a_model_is_exported_and_verified(name: str, format: str, small_data: object, tmp_path: Path) -> None:
    task, data = made(name)
    assert forge.export(task, to=format, out=tmp_path, data=data, batches=4).card["verification"]
