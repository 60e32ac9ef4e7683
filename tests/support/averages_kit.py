"""What the tests of averages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from forge.testing import TinyTask
from forge_plugins import EMA, SWA
from tests.support.averages import (
    ema_of,
    mean_of,
)


@dataclass(frozen=True)
class Kind:
    """A plugin that averages after every update, and what torch has for it."""

    name: str
    make: Callable[..., Any]
    by_torch: Callable[[nn.Module], AveragedModel]


KINDS = [
    Kind("ema", lambda **options: EMA(0.9, **options), ema_of),
    Kind("swa", lambda start=0, **options: SWA(start, **{"every": "1 updates", **options}), mean_of),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


class Half(TinyTask):
    """bfloat16 weights without batch normalisation, which would mind."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(torch.bfloat16)).float()


class Thawing(TinyTask):
    """Its first layer is frozen until it is thawed."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
