"""Small tasks to export, and their validation batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Splits

Batch = tuple[Tensor, Tensor]


class Classifier(forge.TaskModule):
    """Two linear layers with dropout between them; the second axis of what they take is not its first."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.drop(self.first(images).relu()))

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        logits = self(batch[0])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": accuracy}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(*rows: int, shape: tuple[int, ...] = (4,)) -> list[Batch]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(n, *shape, generator=draw), torch.arange(n) % 3) for n in rows or (8, 8, 5)]


def data() -> Splits:
    return Splits(train=batches(), val=batches())


def trained_run(
    folder: Any, *plugins: forge.Plugin, task: forge.TaskModule | None = None, **settings: Any
) -> forge.TaskModule:
    """Train for six updates in a run folder; return the task."""
    task = task or Classifier()
    trainer = forge.Trainer(max_updates=6, seed=0, device="cpu", plugins=list(plugins), run_dir=folder, **settings)
    trainer.fit(task, batches(), batches())
    return task
