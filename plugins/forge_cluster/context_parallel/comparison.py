"""Compare a divided sequence with the whole one, to find models that mix positions outside of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.optim.sharded import is_distributed, local

Outcome = tuple[dict[str, Tensor], list[Tensor]]
"""Metrics, and the gradient of each parameter."""
ENOUGH = 512
"""Positions that are compared at least, where a sequence has as many."""
TOLERANCES = {torch.float64: (1e-6, 0.0, 1e-8), torch.float32: (1e-4, 1e-3, 1e-3)}
"""By type: what metrics may differ by, times their value and as such (an argmax may tip over), and gradients."""
LOOSE = 5e-2, 5e-2, 5e-2
FLOOR = 1e-2
"""The part of the whole gradient's norm that each parameter's may be wrong by, times the tolerance."""


def outcome_of(call: Callable[[], Any], parameters: list[nn.Parameter]) -> Outcome:
    """Return what a step returns, and the gradients of its loss if there are parameters."""
    output = call()
    metrics = {"loss": output} if isinstance(output, Tensor) else output if isinstance(output, Mapping) else {}
    numbers = {
        name: torch.as_tensor(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }
    loss = numbers.get("loss")
    gradients: list[Tensor] = []
    if parameters and loss is not None and loss.requires_grad:
        found = _gradients(loss, parameters)
        gradients = [
            torch.zeros_like(local(parameter)) if gradient is None else local(gradient)
            for parameter, gradient in zip(parameters, found, strict=True)
        ]
    return {name: value.detach().double() for name, value in numbers.items()}, gradients


def _gradients(loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return the gradients of a loss; those of shards by a backward pass, in which the strategy averages them."""
    if not any(map(is_distributed, parameters)):
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    found = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    return found


def mean_over(group: Any, outcome: Outcome, parameters: list[nn.Parameter]) -> Outcome:
    """Return the mean of the ranks' outcomes; the gradients of shards are means already."""
    metrics, gradients = outcome
    size = dist.get_world_size(group)
    own = [g for g, p in zip(gradients, parameters, strict=False) if not is_distributed(p)]
    for tensor in (*metrics.values(), *own):
        dist.all_reduce(tensor, group=group)
        tensor.div_(size)
    return metrics, gradients


def difference(own: Outcome, expected: Outcome, names: list[str], dtype: torch.dtype) -> str | None:
    """Return the largest difference in words; None if results differ only by rounding."""
    relative, absolute, tolerance = TOLERANCES.get(dtype, LOOSE)
    for name, value in expected[0].items():
        theirs, ours = float(value), float(own[0][name])
        allowed = relative * max(abs(theirs), 1e-3) + (0.0 if name == "loss" else absolute)
        if not abs(ours - theirs) <= allowed and not math.isnan(theirs):
            return f"{name} is {ours:.6g} and not {theirs:.6g}"
    norms = [float(gradient.norm()) for gradient in expected[1]]
    floor = FLOOR * sum(norm**2 for norm in norms) ** 0.5
    apart = [float((a - b).norm()) for a, b in zip(own[1], expected[1], strict=True)]
    worst = max(
        ((error / (norm + floor), name) for error, norm, name in zip(apart, norms, names, strict=True) if error),
        default=(0.0, ""),
    )
    return f"the gradient of {worst[1]} is {worst[0]:.0%} off" if worst[0] > tolerance else None


def compared_length(length: int, size: int, multiple: int) -> int:
    """Return how many positions are compared: as many as one rank has in training, and enough to notice."""
    wanted = max(ENOUGH, length // size)
    return min(length, -(-wanted // multiple) * multiple)
