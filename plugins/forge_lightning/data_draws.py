"""What a DataLoader draws from torch's global generator: under Lightning it moves the module's random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from forge.rng import RNGState, seed_all
from forge.util.digest import digest


def draw_as_iterators(given: Any) -> None:
    """Draw what beginning an iteration over the given loaders draws: a base seed for each DataLoader without a
    `generator` of its own."""
    for loader in given.values() if isinstance(given, dict) else given if type(given) is list else [given]:
        if isinstance(loader, DataLoader) and loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()


def moved_since(seed: int, device: torch.device) -> RNGState | None:
    """Return the state of the generators if they have moved since they were seeded; None if not."""
    now = RNGState.capture(device)
    seed_all(seed)
    fresh = RNGState.capture(device)
    now.restore(device)
    return None if digest(now) == digest(fresh) else now
