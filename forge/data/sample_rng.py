"""Seed and restore the random generators that user code may draw from, for loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from forge.rng import RNGState


def seed_generators(word: int) -> None:
    """Seed python's, numpy's and torch's CPU generator from one word of 64 bits."""
    random.seed(word)
    np.random.seed(word >> 32)  # other bits than torch, which uses the same algorithm
    torch.default_generator.manual_seed(word & 0xFFFFFFFF)  # torch.manual_seed would reseed every accelerator too


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore every generator on the host afterwards."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


@contextmanager
def seeded(word: int, device: torch.device) -> Iterator[None]:
    """Seed every generator, the device's too, and restore all of them afterwards."""
    kept = RNGState.capture(device)
    try:
        seed_generators(word)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(word)
        elif device.type == "mps":
            torch.mps.manual_seed(word)
        yield
    finally:
        kept.restore(device)


class OwnSeed:
    """The seed of a loader: its own, or the Trainer's."""

    own_seed: int | None = None
    default_seed: int = 0

    @property
    def seed(self) -> int:
        return self.default_seed if self.own_seed is None else self.own_seed

    def set_default_seed(self, seed: int) -> None:
        """Set the seed of a loader without its own; the Trainer passes its seed."""
        self.default_seed = seed
