"""The composition law: a GAN equals its loop. Beside it, what the law for every lever trains
(test_composition_levers.py)."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import forge
from forge_plugins import Accumulate, Clip
from tests.support import reference


class Net(forge.TaskModule):
    """Dropout and BatchNorm, so that RNG and buffers must be right too."""

    def __init__(self, optimizer: str = "sgd"):
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loss_of(net: Net, batch: Any) -> torch.Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def batches(sizes: list[int], seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def same_state(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def warmup_cosine(optimizer: torch.optim.Optimizer, warmup: int, total: int) -> Any:
    """Linear warm-up to the peak at update `warmup - 1`, then half a cosine towards 0 at update `total`."""

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        share = (update - (warmup - 1)) / (total - (warmup - 1)) if update < total else 1.0
        return (1 + math.cos(math.pi * share)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class GAN(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(self, real: torch.Tensor, name: str) -> torch.Tensor:
        fake = self.generator(torch.randn(len(real), 4))
        if name == "generator":
            return F.softplus(-self.discriminator(fake)).mean()
        return F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()

    def training_step(self, batch: torch.Tensor, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"loss": self.loss(batch, name), "size": len(batch)}

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "discriminator": torch.optim.Adam(self.discriminator.parameters(), lr=1e-2),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=1e-2),
        }


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    window=st.integers(1, 3),
    clip=st.booleans(),
    every=st.integers(1, 3),
)
def test_a_gan_accumulated_and_clipped_equals_its_loop(sizes: list[int], window: int, clip: bool, every: int) -> None:
    class Turns(GAN):
        def takes_turn(self, name: str, update: int) -> bool:
            return name == "discriminator" or update % every == 0

    torch.manual_seed(3)
    ours = Turns()
    theirs = copy.deepcopy(ours)
    data = [torch.randn(n, 6, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(sizes)]
    plugins = [Accumulate(window), *([Clip(0.1)] if clip else [])]

    torch.manual_seed(5)
    result = forge.Trainer(max_epochs=2, plugins=plugins, run_dir=False).fit(ours, data)
    torch.manual_seed(5)
    reference.train_gan(
        theirs,
        theirs.configure_optimizers(),
        data,
        2,
        window=window,
        clip_norm=0.1 if clip else None,
        turns=theirs.takes_turn,
    )
    assert same_state(ours, theirs)
    assert {"train/discriminator/loss", "train/generator/loss"} <= result.metrics.keys()
    assert all(p.requires_grad for p in ours.parameters())
