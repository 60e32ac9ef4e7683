"""What the tests of context_parallel share: tasks over tokens, and those that mix positions where they must not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import forge
from forge_cluster.context_parallel import ContextParallel
from forge_plugins import DDP
from tests.support.fitted import fitted

VOCABULARY, LENGTH, WIDTH = 11, 16, 8
SIZES = (4, 4, 3, 1)
IGNORED = -100


class Layer(nn.Module):
    """Attention and an MLP; keys and values have half the heads."""

    def __init__(self, causal: bool, dropout: float):
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, 4, 2).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, 2, 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.mix(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


class Tokens(forge.TaskModule):
    """A language model with learned positions; some targets do not count."""

    causal, layer = True, Layer

    def __init__(self, dropout: float = 0.0, lr: float = 0.01):
        super().__init__()
        torch.manual_seed(3)
        self.lr = lr
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(4 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(self.layer(self.causal, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def positions(self, x: Tensor) -> Tensor:
        return forge.positions(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(self.positions(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": self.loss(logits, y), "largest": logits.detach().square().mean()}

    validation_step = training_step
    test_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Full(Tokens):
    """Attention to both sides; names imported from torch.nn.functional."""

    causal = False

    class Imported(Layer):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True, scale=0.3)

    layer = Imported

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 2, VOCABULARY, dtype=logits.dtype)
        return cross_entropy(logits.flatten(0, 1), y.flatten(), weight, label_smoothing=0.1)


class Counting(Tokens):
    """Counts its targets, and takes the mean by hand."""

    def num_items(self, batch: Any) -> Any:
        return int((batch[1] != IGNORED).sum())

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits, counts = self(x), y != IGNORED
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
        right = ((logits.argmax(-1) == y) & counts).double().sum() / counts.sum().clamp(min=1)
        return {"loss": (each * counts).sum() / counts.sum().clamp(min=1), "accuracy": right}

    validation_step = training_step
    test_step = training_step


class Padded(Counting):
    """Counts its targets on the device, and leaves the mean to torch, which is NaN where none counts."""

    def num_items(self, batch: Any) -> Any:
        return (batch[1] != IGNORED).sum()

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": self.loss(self(x), y)}

    validation_step = training_step
    test_step = training_step


class Stranger(Tokens):
    """Makes its own positions, as most models do."""

    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1])


# -- mixing positions -------------------------------------------------------------------------------------------------


class Shifting(Tokens):
    """Shifts targets in the step, as transformers does with `labels`."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, _ = batch
        return {"loss": self.loss(self(x)[:, :-1], x[:, 1:])}


class Pooling(Tokens):
    """The mean of a sequence is added to its positions."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(forge.positions(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h + h.mean(1, keepdim=True))


class Dropping(Tokens):
    class Dropped(Layer):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=True)

    layer = Dropped


class Drawing(Tokens):
    """One random number per sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.rand(len(x), 1, 1, dtype=torch.float64))


# -- running ----------------------------------------------------------------------------------------------------------


def token_batches(sizes: Sequence[int] = SIZES, seed: int = 0, length: int = LENGTH, ignored: bool = True) -> list[Any]:
    """Inputs and next tokens. Targets that do not count: none, single ones, and a whole tail."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, size in enumerate(sizes):
        text = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
        x, y = text[:, :-1].contiguous(), text[:, 1:].clone()
        if ignored and number % 3:
            y[0, 1:5] = IGNORED
            y[:, length // 2 + number :] = IGNORED
        made.append((x, y))
    return made


def fit_tokens(task: forge.TaskModule, plugins: list[Any], given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Fit; on several ranks with context_parallel, beside ddp or another strategy. Weights, metrics and counters."""
    data, val = options.pop("data", token_batches()), options.pop("val", token_batches(seed=1))
    strategy = [] if any("strategy" in plugin.provides for plugin in plugins) else [DDP()]
    several = [*strategy, ContextParallel(**given)] if "RANK" in os.environ else []
    return fitted(task, [*plugins, *several], data, val, **options)
