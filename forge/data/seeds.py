"""Seeds out of numbers: mixing them, and seeding and keeping the generators that user code may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from forge.seeding import RNGState

_MASK = 2**64 - 1


def fold(word: int, value: int) -> int:
    """Fold a value into a 64-bit word so that every bit of both matters (splitmix64)."""
    word = (word + value + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def mix(*parts: int) -> int:
    """One 64-bit number out of several integers, each bit of which depends on all of them."""
    word = 0
    for part in parts:
        word = fold(word, part)
    return word


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
