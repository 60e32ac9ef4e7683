"""A loop of one's own on a GPU, cut and continued: the device's random numbers are part of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import forge

pytestmark = pytest.mark.gpu


def loop(folder: Path, updates: int, seed: int) -> nn.Module:
    forge.seed(seed)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    saved = forge.Checkpoints(folder)
    for update in range(saved.restore(state), updates):
        loss = model(torch.randn(6, 4, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (update + 1) % 5 == 0:
            saved.save(update + 1, state, keep=2)
    return model


def test_a_loop_on_a_gpu_ends_in_the_same_bits(tmp_path: Path) -> None:
    straight = loop(tmp_path / "straight", 20, seed=0)
    loop(tmp_path / "cut", 13, seed=0)
    resumed = loop(tmp_path / "cut", 20, seed=7)
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
