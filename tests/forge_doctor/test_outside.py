"""What a forward reaches outside its module."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_doctor.outside import reaches_outside

CALLS: list[int] = []
SCALE = 2.0
generator = torch.Generator()
logger = logging.getLogger(__name__)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += 1
        logger.debug("running")
        return SCALE * self.scaled(F.gelu(self.net(x)))

    def scaled(self, x: Tensor) -> Tensor:
        return double(x)


def double(x: Tensor) -> Tensor:
    return 2 * x


class Lists(Plain):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return x


class Draws(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return noisy(x)


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=generator)


def closed_over() -> nn.Module:
    seen: list[Any] = []

    class Closure(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return next(seen.append(1) or y for y in [x])

    return Closure()


def test_a_module_that_keeps_to_itself_reaches_nothing() -> None:
    assert reaches_outside(nn.Sequential(Plain(), nn.LSTM(4, 4))) == ""


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Lists(), "CALLS"),
        (Draws(), "generator"),
        (closed_over(), "seen"),
    ],
    ids=["list", "generator", "closure"],
)
def test_what_is_outside_is_named(module: nn.Module, named: str) -> None:
    assert named in reaches_outside(nn.ModuleList([module]))
