"""Random generators that a user keeps in objects: find them, save and restore their state, seed them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from forge.util.walk import GENERATORS, walk

Generators = dict[str, Any]
"""Generators by the path at which they were found."""


_GLOBAL = (random._inst, np.random.mtrand._rand, torch.default_generator)  # pyright: ignore[reportAttributeAccessIssue]


def find_generators(roots: Mapping[str, Any]) -> Generators:
    """Return the generators inside these objects; not the global ones of python, numpy and torch."""
    found: Generators = {}
    known = {id(_source(generator)) for generator in _GLOBAL}
    for path, value in walk(roots):
        is_ours = isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)
        if is_ours and id(_source(value)) not in known:
            known.add(id(_source(value)))
            found[path if path not in found else f"{path}#{len(found)}"] = value
    return found


def generator_state(generator: Any) -> dict[str, Any]:
    """Return a generator's state as plain data and tensors."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"kind": "python", "version": version, "words": torch.tensor(words), "gauss": gauss}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy legacy", "state": _plain(generator.get_state(legacy=False))}
    source = _source(generator)
    return {"kind": "numpy", "state": _plain(source.state), "spawned": _spawned(source)}


def set_generator_state(generator: Any, saved: Mapping[str, Any]) -> bool:
    """Restore a state; return whether it belongs to this kind of generator."""
    try:
        if saved["kind"] != generator_state(generator)["kind"]:
            return False
        if saved["kind"] == "torch":
            generator.set_state(saved["state"])
        elif saved["kind"] == "python":
            generator.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
        elif saved["kind"] == "numpy legacy":
            generator.set_state(_arrays(saved["state"]))
        else:
            source = _source(generator)
            source.state = _arrays(saved["state"])
            children = saved.get("spawned", 0) - _spawned(source)  # as `Generator.spawn` counts them
            if children > 0:
                source.seed_seq.spawn(children)
            return children >= 0
    except (TypeError, ValueError, RuntimeError):  # another algorithm, or another device
        return False
    return True


def seed_generator(generator: Any, word: int) -> None:
    """Seed a generator from a word of 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(word >> 1)
    elif isinstance(generator, random.Random):
        generator.seed(word)
    elif isinstance(generator, np.random.RandomState) and isinstance(_source(generator), np.random.MT19937):
        generator.seed(word >> 32)
    else:
        source = _source(generator)
        source.state = type(source)(word).state


def _source(generator: Any) -> Any:
    """Return what makes the numbers: several of numpy's Generators may share it."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator


def _spawned(source: Any) -> int:
    return getattr(getattr(source, "seed_seq", None), "n_children_spawned", 0)


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.str, "words": torch.from_numpy(state.astype(np.uint64).view(np.int64))}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        if state.keys() == {"dtype", "words"}:
            return state["words"].numpy().view(np.uint64).astype(state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state
