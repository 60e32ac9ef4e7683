"""Operators that other libraries than torch bring: a program that uses them loads once their library is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from forge.torch_internals import TorchDispatchMode


class _Namespaces(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


def libraries_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    """Return the libraries whose operators a model runs: operators carry the name of theirs."""
    with torch.no_grad(), _Namespaces() as namespaces:
        model(*inputs)
    return sorted(filter(_is_library, namespaces.seen))


def import_libraries(names: Iterable[str]) -> None:
    """Import what a card names, if a library for torch is installed so; without one, loading says what is missing."""
    for name in filter(_is_library, names):
        import_module(name)


def _is_library(name: str) -> bool:
    """Whether a package of this name is installed, by a distribution that requires torch."""
    if (
        not name.isidentifier() or find_spec(name) is None
    ):  # most are torch's own; to list what is installed takes a second
        return False
    found = packages_distributions().get(name, ())
    return any(re.match(r"torch\b(?!-)", each) for owner in found for each in distribution(owner).requires or ())
