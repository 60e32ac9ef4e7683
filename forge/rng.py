"""Random numbers: seed every generator, combine seeds, and capture and restore the state of the generators."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy


def seed(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, on every device, before a task draws its weights.

    `forge.Trainer(seed=...)` does the same when it is made, so this is for programs that make the task first. It covers
    `random`, `numpy.random` and torch's default generators. It does not reach generators of your own
    (`numpy.random.default_rng()`, `torch.Generator()`): give each its seed.
    """
    initial_weights.stop()
    seed_all(int(seed))


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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


class InitialWeights:
    """Knows which modules drew their weights before any seed was set, so that a fit with a seed can warn of them.

    While torch's default generator has the seed that torch gave it, modules are noted as they get parameters and
    submodules, through torch's own registration hooks. What is loaded afterwards is noted by module too. The hooks are
    removed when forge sets a seed. A seed of at least 2**32 that was set before forge was imported cannot be told from
    torch's own.
    """

    def __init__(self) -> None:
        self._own_seed: int | None = None
        "The seed that torch's default generator began with; None if one was set before."
        self._made: WeakSet[nn.Module] = WeakSet()
        self._loaded: WeakSet[nn.Module] = WeakSet()
        self._hooks: list[Any] = []
        self._began = torch.empty(0)
        "The state in which torch's default generator began."
        # torch has no hook for the loads of all modules
        nn.Module._load_from_state_dict = self._noting(nn.Module._load_from_state_dict)

    def watch(self) -> None:
        """Begin, unless a seed has been set."""
        self.stop()
        own = torch.initial_seed()
        if own < 2**32:
            return
        self._own_seed, self._began = own, torch.Generator().manual_seed(own).get_state()
        self._hooks = [
            register_module_parameter_registration_hook(self._note),
            register_module_module_registration_hook(self._note),
        ]

    def stop(self) -> None:
        """End the watch, before a seed is set. Where the generator has not been drawn from, no weight was drawn."""
        for hook in self._hooks:
            hook.remove()
        if torch.initial_seed() == self._own_seed and torch.equal(torch.get_rng_state(), self._began):
            self._made.clear()
        self._own_seed, self._hooks = None, []

    def unseeded(self, module: nn.Module) -> Iterator[str]:
        """Yield the names of the parameters that were drawn before any seed was set, and were not loaded."""
        for path, part in module.named_modules():
            if part in self._made and part not in self._loaded:
                for name, parameter in part.named_parameters(path, recurse=False):
                    if _is_drawn(parameter):
                        yield name

    def forget(self, module: nn.Module) -> None:
        """Forget a module, whose weights are trained from now on."""
        self._made.difference_update(module.modules())

    def _note(self, module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
        if torch.compiler.is_compiling():  # a container made in a forward: it holds modules that are noted already
            return
        if value is None or torch.initial_seed() != self._own_seed:
            return
        if isinstance(value, nn.Module):  # its parameters may have been registered before the watch began
            self._made.update(m for m in value.modules() if any(map(_has_values, m._parameters.values())))
        elif _has_values(value):
            self._made.add(module)

    def _noting(self, load: Any) -> Any:
        @functools.wraps(load)
        def load_and_note(module: nn.Module, state: Mapping[str, Any], prefix: str, *args: Any, **more: Any) -> Any:
            if any(prefix + name in state for name in module._parameters):
                self._loaded.add(module)
            return load(module, state, prefix, *args, **more)

        return load_and_note


def _has_values(parameter: Tensor | None) -> bool:
    """Whether a parameter has memory: a lazy one, and one on the meta device, is drawn later."""
    return parameter is not None and not is_lazy(parameter) and not parameter.is_meta


def _is_drawn(parameter: Tensor) -> bool:
    """Whether a parameter has values that a generator may have drawn: more than one, and not all the same."""
    if not _has_values(parameter) or parameter.numel() < 2:
        return False
    values = parameter.detach()
    return bool((values != values.flatten()[0]).any())


initial_weights = InitialWeights()
initial_weights.watch()
