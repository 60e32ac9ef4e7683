"""sam on a CUDA device: dropout that the device draws, and every bit that of a hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import SAM, Accumulate, Clip
from tests.support import reference
from tests.support.averages import loss_of

pytestmark = pytest.mark.gpu


class Fused(TinyTask):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_it_equals_a_hand_written_loop_bit_for_bit(adaptive: bool, window: int) -> None:
    ours, theirs, data = Fused(), Fused().cuda(), tiny_batches([8] * 8)
    fit_tiny([SAM(0.5, adaptive=adaptive), Clip(0.5), Accumulate(window)], task=ours, train=data, device="cuda")
    levers = reference.Levers(window=window, clip_norm=0.5, rho=0.5, adaptive=adaptive)
    on_device = [(x.cuda(), y.cuda()) for x, y in data]
    reference.train_with_levers(theirs, loss_of, theirs.configure_optimizers(), on_device, 2, levers, 0)
    assert_same(ours, theirs)
