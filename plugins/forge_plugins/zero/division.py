"""Divide parameters among ranks as whole tensors, and bring the updated ones to all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

BUFFER = 25 * 2**20
"""Bytes of parameters that are sent as one message."""


def owners_of(parameters: Iterable[nn.Parameter], ranks: int) -> dict[int, int]:
    """Return the rank that owns each parameter, by id: the largest first, each to the least loaded rank."""
    loads, owners = [0] * ranks, {}
    for parameter in sorted(parameters, key=lambda p: -p.nbytes):
        owner = loads.index(min(loads))
        owners[id(parameter)] = owner
        loads[owner] += parameter.nbytes
    return owners


def send_owned(owned: Sequence[Sequence[Tensor]]) -> None:
    """Copy the tensors of every owner, in the order of ranks, from it to all ranks."""
    group = dist.distributed_c10d._get_default_group()
    for owner, tensors in enumerate(owned):
        if tensors:
            dist._broadcast_coalesced(group, list(tensors), BUFFER, owner)
