"""stable-pretraining."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package(
    "stable-pretraining==0.1.8",
    needs=(
        "loguru",
        "hydra-core",
        "tabulate",
        "prettytable",
        "timm",
        "kornia",
        "submitit",
        "requests-cache",
        "richuru",
    ),
    alone=True,
)


def stable_pretraining_supervised() -> Any:
    """Module, which steps its optimizer itself, with a classifier's forward, as in its README."""
    import stable_pretraining as spt

    def forward(self: Any, batch: Any, stage: str) -> Any:
        batch["logits"] = self.classifier(self.backbone(batch["image"].flatten(1)))
        if stage == "fit":
            batch["loss"] = nn.functional.cross_entropy(batch["logits"], batch["label"])
        return batch

    module = spt.Module(
        backbone=nn.Sequential(nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)),
        classifier=nn.Linear(16, 4),
        forward=forward,
        optim={"optimizer": {"type": "AdamW", "lr": 1e-2}, "scheduler": {"type": "StepLR", "step_size": 2}},
        hparams={"lr": 1e-2},
    )
    assert isinstance(module, torch.nn.Module)
    train = loader(image=numbers(16, 3, 8, 8), label=classes(4, 16))
    return module, train, loader(image=numbers(8, 3, 8, 8, seed=1), label=classes(4, 8, seed=1))
