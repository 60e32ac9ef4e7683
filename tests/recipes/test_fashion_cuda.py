"""fashion_cnn on CUDA: the images lie there, every update is replayed, evaluations show what they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.data import TensorLoader
from forge_plugins import CudaGraph
from forge_recipes.fashion_cnn import moved

pytestmark = pytest.mark.gpu

QUIET = ["progress", "jsonl", "tensorboard", "checkpoint"]


def test_the_recipe_is_captured_whole_and_learns(small_data: Path) -> None:
    small = ["task.widths=[8,16]", "task.depths=[0,1]", "task.lr=0.02", "data.batch_size=32", "ema.decay=0.9"]
    recipe = forge.recipe(
        "fashion_cnn", [*small, "trainer.max_epochs=6", "trainer.seed=3", "cuda_graph.strict=true"], remove=QUIET
    )
    seen: dict[str, Any] = {}

    @forge.on("log")
    def keep(metrics: dict[str, Any]) -> None:
        seen.update(metrics)

    trainer = forge.Trainer(recipe=recipe, run_dir=False, plugins=[keep])
    task, data = trainer.build()
    assert isinstance(data.train, TensorLoader)
    assert data.train.device.type == "cuda"
    trainer.fit(task, data.train, data.val)
    graph = next(plugin for plugin in trainer.stack if isinstance(plugin, CudaGraph))
    assert graph.replayed >= trainer.progress.update - 8  # the warm-up, and the updates that first_look looks at
    assert seen["val/accuracy"] > 0.7
    assert {"val/predictions", "val/confusion", "val/embedding"} <= seen.keys()
    assert not seen["val/confusion"].data.is_cuda


def test_augmentation_never_waits_and_draws_in_every_replay() -> None:
    images = torch.rand(64, 1, 28, 28, device="cuda")
    moved(images, 2, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moved(images, 2, True)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
