"""The state of a loop of one's own: objects by name, as a tree to save, and a saved tree put back into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forge.errors import CheckpointError
from forge.rng import RNGState
from forge.util.generators import generator_state, set_generator_state
from forge.util.text import few
from forge.util.walk import GENERATORS

RANDOM = "random numbers"
"""The key of the tree that holds the global generators of Python, numpy, torch and its device."""


def tree_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of every object and generator, and plain values as they are, with the global generators."""
    if RANDOM in state:
        raise CheckpointError(f"A checkpoint has its own key {RANDOM!r}. Use another name.")
    return {name: _state_of(value) for name, value in state.items()} | {RANDOM: RNGState.capture(_device()).as_tree()}


def put_back(tree: Mapping[str, Any], state: dict[str, Any], where: str) -> None:
    """Load a tree into the objects and generators of `state`, replace its plain values, and restore the global ones.

    Nothing is changed where their names differ.
    """
    odd = [f"{name!r} is not in the checkpoint" for name in state if name not in tree]
    odd += [f"{name!r} is only in the checkpoint" for name in tree if name not in (*state, RANDOM)]
    if odd:
        raise CheckpointError(f"{where} holds other things than these: {few(odd)}.")
    for name, value in state.items():
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(tree[name])
        elif not isinstance(value, GENERATORS):
            state[name] = tree[name]
        elif not set_generator_state(value, tree[name]):
            raise CheckpointError(f"{where}: {name!r} is the state of a generator of another kind.")
    RNGState.from_tree(tree[RANDOM]).restore(_device())


def _state_of(value: Any) -> Any:
    if isinstance(value, GENERATORS):
        return generator_state(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def _device() -> torch.device:
    """Return the device whose generator is saved: the accelerator, if it is in use."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
