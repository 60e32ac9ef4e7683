"""fp8 on a CPU: its products by a reference in float64, which takes matrices of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from forge_speed import fp8
from forge_speed.fp8 import linear


def reference_product(
    a: Tensor, b: Tensor, step_a: Tensor, step_b: Tensor, bias: Tensor | None = None, fast: bool = False
) -> Tensor:
    """Turn both factors back, and multiply. Autocast leaves float64 alone."""
    assert step_a.dtype is step_b.dtype is torch.float32
    assert a.is_contiguous()  # the layouts that a GPU takes
    assert b.t().is_contiguous()
    exact = (a.double() * step_a.double()) @ (b.double() * step_b.double())
    return (exact if bias is None else exact + bias.double()).to(torch.bfloat16)


@contextmanager
def emulate(tile: int) -> Iterator[None]:
    """Have fp8 act on the CPU, in layers and for batches whose sizes are multiples of `tile`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "acts_on", lambda device: True)
        patch.setattr(linear, "product", reference_product)
        patch.setattr(fp8, "TILE", tile)
        patch.setattr(linear, "TILE", tile)
        yield
