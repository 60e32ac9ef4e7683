"""Divide parameters among ranks as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def owners_of(parameters: Iterable[nn.Parameter], ranks: int) -> dict[int, int]:
    """Return the rank that owns each parameter, by id: the largest first, each to the least loaded rank."""
    loads, owners = [0] * ranks, {}
    for parameter in sorted(parameters, key=lambda p: -p.nbytes):
        owner = loads.index(min(loads))
        owners[id(parameter)] = owner
        loads[owner] += parameter.nbytes
    return owners
