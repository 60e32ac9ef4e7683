"""Quantised models on a GPU: every kind is close to its model at every batch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from forge_ship.quantize import KINDS, quantize, weight_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")]

NEAR = {"int8-dynamic": 0.2, "int8-static": 0.3, "int8-weights": 0.1, "fp8": 0.5}
"""Allowed differences, in deviations of the outputs."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.task = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.task(inputs[0]),)


def batch(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, 512, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(size))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_close_to_its_model(kind: str, dtype: torch.dtype, compiled: bool) -> None:
    model = Net().eval().to("cuda", dtype)
    shapes: Any = (({0: Dim("batch")},),)
    examples = [(batch(64, dtype),), (batch(32, dtype),)]
    run: Any = quantize(model, kind, examples, dynamic_shapes=shapes, device="cuda")
    assert weight_bytes(run) < 0.6 * weight_bytes(model)
    if compiled:
        run = torch.compile(run, dynamic=True)
    for size in (1, 3, 64):
        x = batch(size, dtype)
        with torch.no_grad():
            expected, found = model(x)[0].float(), run(x)[0].float()
        assert (found - expected).abs().max() < NEAR[kind] * expected.std()
