"""Random numbers: seed every generator, combine seeds, and capture and restore the state of the generators."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from forge.errors import ForgeError
from forge.torch_internals import writes

_last_seed: int | None = None
"""The seed that torch's generator got from forge."""


def seed(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, on every device, before a task draws its weights.

    `forge.Trainer(seed=...)` does the same when it is made, so this is for programs that make the task first. It covers
    `random`, `numpy.random` and torch's default generators. It does not reach generators of your own
    (`numpy.random.default_rng()`, `torch.Generator()`): give each its seed.
    """
    try:
        seed_all(operator.index(seed))
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ForgeError("The seed must be a whole number from -2^63 to 2^64 - 1: torch takes no other.") from error


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch on every device."""
    global _last_seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    _last_seed = torch.initial_seed()


def reseed(seed: int) -> None:
    """Seed python, numpy and torch on the devices in use: `seed_all` also notes the seed for those that are not."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_of(seed: int, data_rank: int, update: int = 0) -> int:
    """Return the seed of one rank: the run's own on rank 0 at update 0, else a different one for each rank and update,
    so that a rank that joins a resumed run does not repeat earlier random numbers."""
    return seed if data_rank == 0 and update == 0 else combine_seeds(seed, data_rank, update) % 2**63


def seed_rank(seed: int | None, data_rank: int) -> None:
    """Seed one rank as a fit begins. Without a seed, rank 0 keeps its generators as they are, and the others get their
    own: dropout must not be the same on all ranks."""
    if seed is not None or data_rank:
        seed_all(seed_of(torch.initial_seed() if seed is None else seed, data_rank))


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


class DrawnWeights:
    """What a task drew while it was made and nobody had set a seed, so that a fit with a seed can warn of it."""

    by_task: ClassVar[WeakKeyDictionary[nn.Module, DrawnWeights]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._before = torch.get_rng_state()
        self._after = self._before
        self._versions: dict[str, int] = {}

    def note(self, task: nn.Module) -> None:
        """Note the state of torch's generator, and how often each parameter has been written, once the task is made.
        Nothing is compared yet: a task may be made on fake tensors, where that is impossible."""
        if nobody_has_seeded():
            self.by_task[task] = self
        self._after = torch.get_rng_state()
        self._versions = {name: writes(p) for name, p in task.named_parameters() if _has_values(p)}

    def weights(self, task: nn.Module) -> list[str]:
        """Return the names of the parameters with drawn values that nobody has written (or loaded) since."""
        if torch.equal(self._before, self._after):
            return []
        now = task.named_parameters()
        return [name for name, p in now if _has_values(p) and self._versions.get(name) == writes(p) and _varies(p)]


def nobody_has_seeded() -> bool:
    """Whether torch's generator still has the seed that torch gave it, a random one of more than 32 bits."""
    return torch.initial_seed() >= 2**32 and torch.initial_seed() != _last_seed


def _has_values(parameter: Tensor) -> bool:
    """Whether a parameter has memory: a lazy one, and one on the meta device, is drawn later."""
    return not is_lazy(parameter) and not parameter.is_meta


def _varies(parameter: Tensor) -> bool:
    """Whether a parameter's values are not all the same, as drawn ones are not."""
    values = parameter.detach().flatten()
    return bool((values != values[:1]).any())
