"""Compare a divided sequence with the whole one, to find models that mix positions outside of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.optim.sharded import is_distributed, local
from forge.twin.compare import ROUNDING, Difference, first_difference
from forge.twin.record import Record

Outcome = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Metrics, and gradients by parameter."""
ENOUGH = 512
"""Positions that are compared at least, where a sequence has as many."""


def outcome_of(call: Callable[[], Any], parameters: Mapping[str, nn.Parameter]) -> Outcome:
    """Return what a step returns, and the gradients of its loss if there are parameters."""
    output = call()
    metrics = {"loss": output} if isinstance(output, Tensor) else output if isinstance(output, Mapping) else {}
    numbers = {
        name: torch.as_tensor(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }
    loss = numbers.get("loss")
    gradients: dict[str, Tensor] = {}
    if parameters and loss is not None and loss.requires_grad:
        gradients = dict(zip(parameters, _gradients(loss, [*parameters.values()]), strict=True))
    return {name: value.detach().double() for name, value in numbers.items()}, gradients


def _gradients(loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor]:
    """Return the gradients of a loss; those of shards by a backward pass, in which the strategy averages them."""
    if not any(map(is_distributed, parameters)):
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    return [local(gradient) for gradient in found]


def mean_over(group: Any, outcome: Outcome, parameters: Mapping[str, nn.Parameter]) -> Outcome:
    """Return the mean of the ranks' outcomes; the gradients of shards are means already."""
    metrics, gradients = outcome
    own = [gradient for name, gradient in gradients.items() if not is_distributed(parameters[name])]
    for tensor in (*metrics.values(), *own):
        dist.all_reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))
    return metrics, gradients


def difference(own: Outcome, expected: Outcome, dtype: torch.dtype) -> Difference | None:
    """Return the first difference of two outcomes; None if they differ only by rounding.

    A metric beside the loss is noise by the largest of them: an argmax may tip over.
    """
    known = [name for name, value in expected[0].items() if not value.isnan()]
    records = Record(), Record()
    for record, (metrics, gradients) in zip(records, (own, expected), strict=True):
        for name in known:
            record.mark(name, metrics[name], kind="" if name == "loss" else "the metrics")
        record.mark("", gradients, kind="the gradients")
    return first_difference(*records, tolerance=ROUNDING.get(dtype, ROUNDING[torch.bfloat16]))


def compared_length(length: int, size: int, multiple: int) -> int:
    """Return how many positions are compared: as many as one rank has in training, and enough to notice."""
    wanted = max(ENOUGH, length // size)
    return min(length, -(-wanted // multiple) * multiple)
