"""qat on a CUDA device: no host sync in an update, and captured updates round as uncaptured ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge.testing import TinyTask, assert_same, fit_tiny
from forge_plugins import CudaGraph
from forge_ship.qat import QAT, install

pytestmark = pytest.mark.gpu


def test_a_rounded_layer_does_not_wait_for_the_device() -> None:
    layer = nn.Conv2d(3, 4, 3).cuda()
    install(layer)
    x = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
    layer(x).sum().backward()  # allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_updates_round_as_uncaptured_ones() -> None:
    captured, _ = fit_tiny([QAT(), CudaGraph()], task=TinyTask(dropout=0.0), device="cuda")
    plain, _ = fit_tiny([QAT()], task=TinyTask(dropout=0.0), device="cuda")
    assert_same(captured, plain)
