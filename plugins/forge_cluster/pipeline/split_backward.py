"""Check that torch can divide a stage's backward pass, as zero-bubble schedules do.

They compute the gradients of inputs first, and those of weights later, from what the graph keeps between. torch cannot
where paths from several weights join before they meet the stage's input: layers outside of blocks that compute a
condition for every block, say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_cluster.torch_internals import stage_backward_input, stage_backward_weight

SPLITTING = ("interleaved_zero_bubble", "zbv", "dualpipev")
CLOSE = 1e-2
"""Share of a gradient's size that it may differ by: an error is as large as a whole path."""


def can_split(output: Tensor, received: Tensor, weights: Sequence[nn.Parameter], weights_again: Any) -> bool:
    """Whether both halves give the gradients of one backward pass. `weights_again` runs the stage a second time."""
    held = [weight.grad for weight in weights]
    start = torch.ones_like(output)
    try:
        whole = torch.autograd.grad(output, [received, *weights], start, allow_unused=True)
        for weight in weights:
            weight.grad = None
        output = weights_again()
        inputs, groups = stage_backward_input([output], [start], [received], iter(weights))
        stage_backward_weight(iter(weights), groups)
        return all(map(_close, whole, [inputs[0], *(weight.grad for weight in weights)]))
    except RuntimeError:
        return False
    finally:
        for weight, grad in zip(weights, held, strict=True):
            weight.grad = grad


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other or not bool((one if other is None else other).any())  # pyright: ignore[reportOptionalMemberAccess]
    return float((one - other).norm()) <= CLOSE * max(float(one.norm()), float(other.norm()))
