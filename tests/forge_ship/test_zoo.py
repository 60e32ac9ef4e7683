"""Recipes, small, and models of others: each export is verified."""

from __future__ import annotations

from collections.abc import Callable
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


class Stranger(forge.TaskModule):
    """A model of another library as a task: `pick` takes its output apart, and the labels are its own at first."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor] = lambda output: output):
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.pick(self.model(*inputs))

    def validation_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        *inputs, labels = batch
        logits = self(*inputs).float()
        logits = logits if logits.dim() == 2 else logits[:, -1]
        return {"loss": F.cross_entropy(logits, labels % logits.shape[1])}


class Masked(Stranger):
    """As Stranger, for a model that takes ids and a mask by name."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.pick(self.model(input_ids=ids, attention_mask=mask))


class Recurrent(nn.Module):
    """Two layers of LSTM and a linear layer over the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.head(self.lstm(sequence)[0][:, -1])


def pictures(size: int, rows: tuple[int, ...] = (4, 4, 3)) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [[torch.randn(n, 3, size, size, generator=draw), torch.arange(n)] for n in rows]


def sequences(lengths: tuple[int, ...]) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [[torch.randn(4, length, 8, generator=draw), torch.arange(4)] for length in lengths]


def texts(vocabulary: int, mask: bool) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    batches = []
    for rows, length in ((4, 12), (4, 16), (3, 9)):
        ids = torch.randint(1, vocabulary, (rows, length), generator=draw)
        batches.append([ids, *([torch.ones_like(ids)] if mask else []), torch.arange(rows)])
    return batches


def _resnet() -> tuple[Any, Any]:
    import torchvision

    return Stranger(torchvision.models.resnet18(weights=None)), pictures(64)


def _bert() -> tuple[Any, Any]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    return Masked(BertModel(config), lambda output: output.last_hidden_state), texts(100, mask=True)


def _gpt2() -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=64, use_cache=False)
    return Stranger(GPT2LMHeadModel(config), lambda output: output.logits), texts(100, mask=False)


STRANGERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "torchvision resnet18": _resnet,
    "LSTM, lengths vary": lambda: (Stranger(Recurrent()), sequences((16, 9, 12))),
    "transformers BERT": _bert,
    "transformers GPT-2": _gpt2,
}


def made(name: str) -> tuple[forge.TaskModule, Any]:
    """Return a task with its validation data; a stranger's batch norms have seen data."""
    torch.manual_seed(0)
    if name in STRANGERS:
        task, batches = STRANGERS[name]()
        task.train()
        for parameter in task.parameters():  # a head of zeros would hide every mistake before it
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        with torch.no_grad():
            for batch in batches:
                task(*batch[:-1])
        return task.eval(), batches
    recipe = forge.recipe(name, SMALL[name], remove=list(forge.recipe(name).plugins))
    task, data = forge.Trainer(recipe=recipe, run_dir=False).build()
    return task.eval(), data.val


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx", "aoti", "torchscript"])
@pytest.mark.parametrize("name", [*SMALL, *STRANGERS])
def test_a_model_is_exported_and_verified(name: str, format: str, small_data: object, tmp_path: Path) -> None:
    if name in STRANGERS and name.partition(" ")[0] in ("torchvision", "transformers"):
        pytest.importorskip(name.partition(" ")[0])
    task, data = made(name)
    assert forge.export(task, to=format, out=tmp_path, data=data, batches=4).card["verification"]
