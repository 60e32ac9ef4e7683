"""What a DataLoader draws from torch's global generator: under Lightning it moves the module's random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from forge_lightning.combined_loader import CombinedTrainLoader


def draw_as_iterators(given: Any) -> None:
    """Draw what beginning an iteration over the given loaders draws: a base seed for each DataLoader without a
    `generator` of its own."""
    if isinstance(given, CombinedTrainLoader):
        given = given.parts
    for loader in given.values() if isinstance(given, dict) else given if type(given) is list else [given]:
        if isinstance(loader, DataLoader) and loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()
