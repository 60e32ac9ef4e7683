"""Send each token to the ranks that hold the experts it chose, and bring back what they made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_cluster.torch_internals import all_to_all

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A call of the experts that this rank holds: tokens, the expert of each by its number here, and its weight."""


@dataclass(frozen=True)
class Ranks:
    """The processes between which tokens travel; without groups, one."""

    group: Any = None
    "The ranks that hold all experts together."
    size: int = 1
    rank: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # groups are not copied with a model


def route(
    experts: Experts, count: int, ranks: Ranks, tokens: Tensor, chosen: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of what the chosen experts make of each token, and how many choices of this rank fell on each.

    `count` experts are divided evenly among ranks. `chosen` has a row of numbers for each token; a number of `count`
    chooses none.
    """
    flat = chosen.reshape(-1)
    choices = chosen.shape[1] if chosen.ndim > 1 else 1
    own = flat.new_zeros(count + 1, dtype=torch.int64).scatter_add_(0, flat.long(), torch.ones_like(flat.long()))
    order, own = flat.argsort(stable=True), own[:count]
    held = count // ranks.size
    coming = _by_rank(own, ranks)[:, ranks.rank * held : (ranks.rank + 1) * held]
    leaving = own.view(ranks.size, held).sum(1)
    sizes: list[int] = torch.cat([leaving, coming.sum(1)]).tolist()  # on the host: torch divides messages there
    outward, inward = sizes[: ranks.size], sizes[ranks.size :]
    order = order[: sum(outward)]
    numbers = torch.arange(held, device=flat.device).repeat(ranks.size)
    numbers = numbers.repeat_interleave(coming.reshape(-1), output_size=sum(inward))

    def travel(rows: Tensor, there: list[int], back: list[int]) -> Tensor:
        if ranks.group is None:
            return rows
        if rows.requires_grad and torch.is_grad_enabled():
            return all_to_all(rows, back, there, ranks.group)
        found = rows.new_empty(sum(back), *rows.shape[1:])  # torch 2.10 has none without gradients on a host
        dist.all_to_all_single(found, rows.contiguous(), back, there, group=ranks.group)
        return found

    arrived = travel(tokens[order // choices], outward, inward)
    weighed = travel(weights.reshape(-1)[order], outward, inward)
    made = travel(_computed(experts, arrived, numbers.to(chosen.dtype), weighed, chosen.ndim), inward, outward)
    output = made.new_zeros(flat.numel(), made.shape[1]).index_copy(0, order, made)
    return output.view(len(tokens), choices, made.shape[1]).sum(1), own


def _by_rank(own: Tensor, ranks: Ranks) -> Tensor:
    """Return how many choices of each rank fell on each expert."""
    if ranks.group is None:
        return own[None]
    every = own.new_empty(ranks.size * len(own))
    dist.all_gather_into_tensor(every, own, group=ranks.group)
    return every.view(ranks.size, len(own))


def _computed(experts: Experts, tokens: Tensor, numbers: Tensor, weights: Tensor, dimensions: int) -> Tensor:
    """Return what this rank's experts make of tokens that were sent here. Where none was, one that does not count is
    computed: the backward pass then sends gradients on all ranks, and those of the experts are zeros."""
    count = len(tokens)
    if not count:
        tokens, numbers = torch.cat([tokens, tokens.new_ones(1, tokens.shape[1])]), numbers.new_zeros(1)
        weights = torch.cat([weights, weights.new_ones(1)])
    shape = (-1, 1) if dimensions > 1 else (-1,)
    return experts(tokens, numbers.view(shape), weights.view(shape))[:count]
