"""Seeding and keeping the generators that user code may draw from, for loaders."""

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
    np.random.seed(word >> 32)  # numpy and torch share an algorithm: with other bits they give other numbers
    torch.default_generator.manual_seed(word & 0xFFFFFFFF)  # torch.manual_seed would reseed every accelerator too


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put every generator on the host back as it was, whatever happens."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


@contextmanager
def seeded(word: int, device: torch.device) -> Iterator[None]:
    """Inside, every generator is seeded, the device's too; after it, all are as they were before."""
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
    """What loaders that can be given a seed share: without one they use the Trainer's."""

    own_seed: int | None = None
    default_seed: int = 0

    @property
    def seed(self) -> int:
        """The loader's own seed, or the Trainer's."""
        return self.default_seed if self.own_seed is None else self.own_seed

    def set_default_seed(self, seed: int) -> None:
        """The seed to use where the loader was made without one; the Trainer hands on its own."""
        self.default_seed = seed
