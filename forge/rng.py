"""Random numbers: seed every generator, combine seeds, and capture and restore the state of the generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_of(seed: int, data_rank: int, update: int = 0) -> int:
    """Return the seed of one rank: the run's own on rank 0 at update 0, else a different one for each rank and update,
    so that a rank that joins a resumed run does not repeat earlier random numbers."""
    return seed if data_rank == 0 and update == 0 else combine_seeds(seed, data_rank, update) % 2**63


@dataclass(frozen=True, slots=True)
class RNGState:
    """The state of every generator that user code may draw from."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RNGState:
        on_device = None
        if device.type == "cuda":
            on_device = torch.cuda.get_rng_state(device)
        elif device.type == "mps":
            on_device = torch.mps.get_rng_state()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device)

    def as_tree(self) -> dict[str, Any]:
        """Return the state as plain data and tensors, for a checkpoint."""
        version, words, gauss = self.python
        kind, key, position, has_gauss, cached = self.numpy
        return {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "numpy": {
                "kind": kind,
                "key": torch.from_numpy(key.astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            },
            "torch": self.torch,
            "device": self.device,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> RNGState:
        """Return the state from the result of `as_tree`."""
        python, numpy = tree["python"], tree["numpy"]
        key = numpy["key"].numpy().astype(np.uint32)
        return cls(
            (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            (numpy["kind"], key, numpy["position"], numpy["has_gauss"], numpy["gauss"]),
            tree["torch"],
            tree["device"],
        )

    def restore(self, device: torch.device) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)
        elif self.device is not None and device.type == "mps":
            torch.mps.set_rng_state(self.device)


_MASK = 2**64 - 1


def fold(word: int, value: int) -> int:
    """Fold a value into a 64-bit word so that every bit of both matters (splitmix64)."""
    word = (word + value + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def combine_seeds(*parts: int) -> int:
    """Return a 64-bit number, each bit of which depends on all parts."""
    word = 0
    for part in parts:
        word = fold(word, part)
    return word
