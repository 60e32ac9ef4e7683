"""minerva."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("minerva==0.3.11b0", needs=("einops", "timm", "torchinfo", "perlin-noise"), alone=True)


def minerva_simclr() -> Any:
    """SimCLR, on two views of each sample."""
    from minerva.models.ssl.simclr import SimCLR

    views = list(zip(numbers(16, 3, 8, 8), numbers(16, 3, 8, 8, seed=1), strict=True))
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
    head = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 8))
    pairs: Any = [(pair, torch.tensor(0)) for pair in views]
    batches = DataLoader(pairs, batch_size=8)
    return SimCLR(backbone, head), batches, batches


def minerva_supervised() -> Any:
    """SimpleSupervisedModel with metrics."""
    from minerva.models.nets.base import SimpleSupervisedModel
    from torchmetrics import Accuracy

    score = {"acc": Accuracy(task="multiclass", num_classes=3)}
    module = SimpleSupervisedModel(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)),
        nn.Linear(8, 3),
        nn.CrossEntropyLoss(),
        train_metrics=score,
        val_metrics={"acc": Accuracy(task="multiclass", num_classes=3)},
        lr_scheduler=torch.optim.lr_scheduler.StepLR,
        lr_scheduler_kwargs={"step_size": 1},
    )
    train = loader(numbers(16, 6), classes(3, 16))
    return module, train, loader(numbers(8, 6, seed=1), classes(3, 8, seed=1))
