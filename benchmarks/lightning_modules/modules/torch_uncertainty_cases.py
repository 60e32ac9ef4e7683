"""torch-uncertainty."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torch-uncertainty", needs=("scikit-learn", "timm"))


def uncertainty_classification() -> Any:
    """ClassificationRoutine."""
    import torch
    from torch import nn
    from torch_uncertainty.routines import ClassificationRoutine

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    recipe = torch.optim.Adam(model.parameters(), lr=1e-2)
    module = ClassificationRoutine(model=model, num_classes=4, loss=nn.CrossEntropyLoss(), optim_recipe=recipe)
    return module, loader(numbers(48, 8), classes(4, 48)), loader(numbers(16, 8, seed=1), classes(4, 16, seed=1))
