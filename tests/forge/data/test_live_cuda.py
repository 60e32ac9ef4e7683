"""Live loaders on a GPU: data stay where they are made, no batch is read ahead, a cut run ends in the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.data import Replay, Rollouts
from forge.testing import assert_same
from forge_plugins import AMP, Checkpoint, CudaGraph, Prefetch
from tests.forge.data.test_live import Actor
from tests.forge.snapshot.test_resume import PowerCut, cut_at

pytestmark = pytest.mark.gpu


def there(task: Any) -> dict[str, torch.Tensor]:
    assert not torch.is_grad_enabled()
    device = next(task.parameters()).device
    assert device.type == "cuda"
    x = torch.randn(20, 4, device=device)
    return {"x": x, "y": task.net(x).float() + torch.randn(20, 2, device=device)}


def life(folder: Path | bool, loader: Any, *plugins: Any) -> Actor:
    task = Actor()
    settings: Any = {"max_updates": 22, "seed": 3, "device": "cuda", "resume": "auto" if folder else None}
    forge.Trainer(plugins=[Prefetch(), *plugins], run_dir=folder, **settings).fit(task, loader)
    return task


def loader_of(kind: str) -> Any:
    if kind == "rollouts":
        return Rollouts(there, batch_size=5, epochs=2)
    return Replay(50, there, batch_size=8, every=3, warmup=30, epoch=7)


@pytest.mark.parametrize("kind", ["rollouts", "replay"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run_cut_on_a_gpu_ends_in_the_same_bits(kind: str, precision: str, tmp_path: Path) -> None:
    stack = [] if precision == "float32" else [AMP("bf16")]
    straight = life(False, loader_of(kind), *stack)
    often = Checkpoint(every="2 updates")
    with pytest.raises(PowerCut):
        life(tmp_path, loader_of(kind), *stack, often, cut_at(7))
    assert_same(life(tmp_path, loader_of(kind), *stack, often), straight)


def test_what_was_made_on_the_gpu_stays_there() -> None:
    seen: list[str] = []

    class Looks(Actor):
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append(batch["x"].device.type)
            return super().training_step(batch)

    forge.Trainer(plugins=[], max_updates=3, seed=0, device="cuda", run_dir=False).fit(Looks(), loader_of("rollouts"))
    assert seen == ["cuda"] * 3


def test_updates_on_collections_are_captured_in_a_graph() -> None:
    plain, graphed = life(False, loader_of("rollouts")), life(False, loader_of("rollouts"), CudaGraph())
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(graphed.state_dict()[name], x)
