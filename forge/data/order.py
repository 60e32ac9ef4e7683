"""The order of an epoch: a pure function of (seed, epoch), drawn from a private generator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


def epoch_order(length: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of `range(length)` that depends on nothing but its arguments; the global RNG is not touched."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63)
    return torch.randperm(length, generator=generator)


class EpochSampler(Sampler[int]):
    """Indices in the order of the current epoch; `set_epoch` chooses it."""

    def __init__(self, length: int, shuffle: bool, seed: int | None):
        self.length, self.shuffle, self.epoch = length, shuffle, 0
        self.own_seed, self.default_seed = seed, 0

    @property
    def seed(self) -> int:
        """The loader's own seed, or the Trainer's."""
        return self.default_seed if self.own_seed is None else self.own_seed

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> torch.Tensor:
        return epoch_order(self.length, self.seed, self.epoch) if self.shuffle else torch.arange(self.length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def __len__(self) -> int:
        return self.length
