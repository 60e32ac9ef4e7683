"""fsdp: parameters without a dimension, as a learned temperature, which torch does not shard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forge
from forge_cluster.pipeline import Pipeline
from forge_plugins import EMA, Accumulate, Clip, TensorParallel
from forge_plugins.fsdp import COUNTS_UNUSED, FSDP
from forge_plugins.fsdp.blocks import sharded_blocks
from tests.support.fsdp_kit import Gain, Shared, Tempered, close, deep, train, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

EXACT = 1e-11


# ---------------------------------------------------------------------------------------------------------------------
# The task, before and after


def test_a_scalar_that_blocks_share_leaves_them_units() -> None:
    assert list(sharded_blocks(deep(Shared), [], 0)) == ["blocks.0", "blocks.1", "blocks.2"]


def left_over(folder: str, options: dict[str, Any]) -> set[str]:
    """The parameters that a task has after a fit as before it."""
    task = deep(Tempered)
    own = {name: id(parameter) for name, parameter in task.named_parameters()}
    plugins = [FSDP(**options)] if "RANK" in os.environ else []
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=folder, plugins=plugins)
    trainer.fit(task, wide())
    return {name for name, parameter in task.named_parameters() if id(parameter) == own[name]}


@pytest.mark.slow
@pytest.mark.parametrize("gather", some([False, True]))
def test_a_task_keeps_its_scalars_and_exports_them(gather: bool, tmp_path: Path) -> None:
    every = left_over(str(tmp_path / "alone"), {})
    singles = {name for name in every if name.endswith("gain")}
    kept = every if gather else singles
    assert ranks(2)(left_over, str(tmp_path / "together"), {"gather": gather}) == [kept] * 2
    ours, theirs = deep(Tempered), deep(Tempered)
    forge.load_weights(ours, tmp_path / "together" / "weights.safetensors")
    forge.load_weights(theirs, tmp_path / "alone" / "weights.safetensors")
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=EXACT, atol=EXACT)


# ---------------------------------------------------------------------------------------------------------------------
# Beside other plugins


class Chosen(Tempered):
    """A sample whose first feature is positive uses one more parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = Gain()

    def forward(self, x: Tensor) -> Tensor:
        rare = (x[:, 0] > 0).nonzero()[:, 0]
        logits = super().forward(x)
        return logits.index_put((rare,), self.rare(logits[rare])) if len(rare) else logits


def sorted_out(find_unused: bool) -> dict[str, Any]:
    """Some updates in which rank 0 alone has samples of that kind, some in which no rank has, or all have."""
    x, y = wide(sizes=(8,))[0]
    low, high = x.clone(), x.clone()
    low[:, 0], high[:, 0] = -1.0, 1.0
    mixed = torch.cat([high[:4], low[4:]])
    return train(deep(Chosen), [FSDP(find_unused=find_unused)], [(each, y) for each in (mixed, low, high, mixed)])


@pytest.mark.slow
@pytest.mark.skipif(not COUNTS_UNUSED, reason="needs torch 2.15")
def test_a_scalar_that_one_rank_uses_trains_if_asked_for() -> None:
    alone = sorted_out(False)
    for rank in ranks(2)(sorted_out, True):
        close(rank, alone, EXACT)


@pytest.mark.slow
def test_a_scalar_that_one_rank_uses_is_refused_by_name() -> None:
    for error in ranks(2).errors(sorted_out, False):
        assert "fsdp: rare.gain got a gradient on some ranks, or in some updates, only" in error


def beside(kind: str) -> dict[str, Any]:
    plugins = {
        "tensor": lambda: [FSDP(), TensorParallel(2, plan={"stem": "gather"})],
        "divided": lambda: [FSDP(), TensorParallel(2, plan={"stem": "gather", "temperature": "replicate"})],
        "sharded stages": lambda: [Pipeline(2, stages=2, shard=True)],
    }
    several = plugins[kind]() if "RANK" in os.environ else []
    options: dict[str, Any] = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False, "log_every": 2}
    stack = [Accumulate(2), Clip(0.05), EMA(0.9), *several]
    task = deep(Tempered)
    result = forge.Trainer(plugins=stack, **options).fit(task, wide(sizes=(8,) * 4), wide(1))
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    return {"weights": weights, "metrics": result.metrics, "updates": result.updates}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "kind"),
    some([(2, "tensor"), (4, "tensor"), (4, "sharded stages")]),
)
def test_a_scalar_trains_beside_divided_layers(count: int, kind: str) -> None:
    alone = beside(kind)
    for rank in ranks(count)(beside, kind):
        close(rank, alone, EXACT)


def test_a_scalar_in_a_layer_of_the_plan_is_refused_by_name() -> None:
    for error in ranks(2).errors(beside, "divided"):
        assert "fsdp: temperature.gain of Tempered has no dimension, and is in a layer that is divided." in error
        assert "Leave that layer out of tensor_parallel.plan" in error
