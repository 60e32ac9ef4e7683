"""A loop of one's own saves, is cut, and continues from the newest whole checkpoint, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import forge
from forge.checkpoint import objects


def loop(folder: Path, updates: int, seed: int = 0, device: str = "cpu", **more: Any) -> dict[str, Any]:
    """Draw from every kind of generator, that of the device included, with a checkpoint every fifth update."""
    forge.seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "losses": []}
    state |= {"shuffle": torch.Generator(), "noise": np.random.default_rng(seed), **more}
    saved = forge.Checkpoints(folder)
    for update in range(saved.restore(state), updates):
        noise = random.random() + np.random.rand() + state["noise"].random()
        loss = (model(torch.randn(6, 4, generator=state["shuffle"]).to(device)) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        state["losses"].append(loss.item())
        if (update + 1) % 5 == 0:
            saved.save(update + 1, state, keep=2)
    return state


def weights(state: dict[str, Any]) -> list[Tensor]:
    return list(state["model"].parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cut", [3, 5, 18])
def test_a_loop_that_was_cut_ends_in_the_same_bits(tmp_path: Path, cut: int, device: str) -> None:
    straight = loop(tmp_path / "straight", 20, device=device)
    loop(tmp_path / "cut", cut, device=device)
    resumed = loop(tmp_path / "cut", 20, 0 if cut < 5 else 7, device)  # before a checkpoint nothing is known
    assert all(map(torch.equal, weights(straight), weights(resumed)))
    assert resumed["losses"] == straight["losses"]


def test_only_the_newest_stay_and_the_damaged_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight, saved = loop(tmp_path, 20), forge.Checkpoints(tmp_path)
    assert saved.updates() == [15, 20]
    (saved.path(20) / "state.json").write_text("{}")
    resumed = loop(tmp_path, 20)
    assert "Skipping the checkpoint update-00000020" in caplog.text
    assert all(map(torch.equal, weights(straight), weights(resumed)))
    for path in saved.all():
        (path / "manifest.json").unlink()
    with pytest.raises(forge.CheckpointError, match=r"None of the checkpoints in .* is valid"):
        loop(tmp_path, 20)


def test_what_lies_ahead_of_a_resume_does_not_stay(tmp_path: Path) -> None:
    saved = forge.Checkpoints(tmp_path)
    for update in (10, 20, 30, 25):  # 30 was damaged, say
        saved.save(update, {}, keep=2)
    assert saved.updates() == [20, 25]
    assert (tmp_path / "latest").resolve() == saved.path(25)


def test_other_names_are_refused_before_anything_changes(tmp_path: Path) -> None:
    loop(tmp_path, 5)
    model = nn.Linear(4, 1)
    before = model.weight.clone()
    with pytest.raises(forge.CheckpointError, match="'ema' is not in the checkpoint, 'optimizer' is only in the"):
        forge.Checkpoints(tmp_path).restore({"model": model, "ema": nn.Linear(2, 2)})
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("state", "message"),
    [({"task": object()}, "task"), ({"strides": 1}, "own key 'strides'"), ({objects.RANDOM: 1}, objects.RANDOM)],
)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with pytest.raises(forge.CheckpointError, match=message):
        forge.Checkpoints(tmp_path).save(1, state)
    assert not list(tmp_path.iterdir())


def test_a_generator_of_another_kind_is_refused(tmp_path: Path) -> None:
    forge.Checkpoints(tmp_path).save(1, {"noise": torch.Generator()})
    with pytest.raises(forge.CheckpointError, match="'noise' is the state of a generator of another kind"):
        forge.Checkpoints(tmp_path).restore({"noise": random.Random()})


def test_it_keeps_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(forge.CheckpointError, match="keep is 0; it must be at least 1"):
        forge.Checkpoints(tmp_path).save(1, {}, keep=0)
