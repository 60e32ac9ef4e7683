"""Meshes: strategies along several axes at once train what one process does, and continue each other's runs."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import forge
from forge.errors import StackError
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.zero import Zero
from forge_plugins import EMA, FSDP, Accumulate, Checkpoint, Clip
from forge_plugins.tensor_parallel import TensorParallel
from tests.support import mesh_kit as kit
from tests.support.expert_kit import fit_experts
from tests.support.fitted import apart
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

EXACT = 1e-11
"""The largest difference of a weight in float64: sums are taken in another order, and nothing else."""
FOUR: list[Any] = [{"pipe": 2, "tensor": 2}, {"shard": 2, "context": 2}, {"context": 2, "tensor": 2}]
EIGHT: list[Any] = [
    {"data": 2, "pipe": 2, "tensor": 2},
    {"shard": 2, "pipe": 2, "tensor": 2},
    {"data": 2, "shard": 2, "tensor": 2},
    {"data": 2, "shard": 2, "context": 2},
    {"shard": 2, "context": 2, "tensor": 2},
    {"data": 2, "shard": 2, "pipe": 2},
]
CUTS = {
    (nn.Linear, "column"): {"weight": 0, "bias": 0},
    (nn.Linear, "gather"): {"weight": 0, "bias": 0},
    (nn.Linear, "row"): {"weight": 1},
    (nn.Embedding, "gather"): {"weight": 1},
}
"""The dimension of each parameter of a layer that a style of tensor_parallel cuts."""


def bytes_per_rank(mesh: Mapping[str, int]) -> float:
    """The bytes of parameters on the fullest rank: 1/tensor of what the plan cuts, 1/pipe of blocks, and of rows
    1/shard, under fsdp 1/(shard × context)."""
    task, total = kit.MeshWords(), 0.0
    rows = mesh.get("shard", 1) * (1 if "pipe" in mesh else mesh.get("context", 1))
    for name, parameter in task.named_parameters():
        owner, _, last = name.rpartition(".")
        kind = next((kind for pattern, kind in kit.PLAN.items() if fnmatch.fnmatchcase(owner, pattern)), "")
        cut = CUTS.get((type(task.get_submodule(owner)), kind), {}).get(last)
        shape = list(parameter.shape)
        if cut is not None:
            shape[cut] //= mesh.get("tensor", 1)
        if shape:
            shape[0] = -(-shape[0] // rows)
        total += math.prod(shape) * parameter.itemsize / (mesh.get("pipe", 1) if name.startswith("blocks.") else 1)
    return total


@pytest.fixture(autouse=True)
def new_ranks() -> None:
    """Begin with processes in which torch has made no other mesh: a rank that had one crashed in a reduction."""
    for count in (2, 4, 8):
        ranks(count).stop()


@pytest.mark.parametrize("mesh", some([*FOUR, *EIGHT]))
def test_a_mesh_trains_what_one_process_trains(mesh: dict[str, int]) -> None:
    alone, together = kit.fit_levers(mesh), ranks(math.prod(mesh.values()))(kit.fit_levers, mesh)
    for rank in together:
        assert rank["updates"] == alone["updates"]
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)
        assert apart(rank["weights"], alone["weights"]) < EXACT
        assert rank["held"]["state"] == 2 * (rank["held"]["parameters"] - 8)  # Adam's moments; a number has none
    fullest = max(rank["held"]["parameters"] for rank in together)
    assert fullest == bytes_per_rank(mesh)


def owned_states(stage: int) -> dict[str, Any]:
    return kit.fit_mesh(
        {"data": 2, "context": 2}, [Accumulate(2), Clip(0.05)], several=[Zero(stage=stage), ContextParallel()]
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_beside_slices(stage: int) -> None:
    alone = owned_states(stage)
    for rank in ranks(4)(owned_states, stage):
        assert apart(rank["weights"], alone["weights"]) < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# From one mesh to another


def resumed(folder: str, epochs: int, mesh: dict[str, int], has_experts: bool) -> dict[str, Any]:
    plugins = [Accumulate(2), Clip(0.05), EMA(0.5), Checkpoint(every="1 epoch")]
    fit = fit_experts if has_experts else kit.fit_mesh
    return fit(mesh, plugins, max_epochs=epochs, run_dir=folder, resume="auto", validate_every=None)


CHAINS: list[Any] = [
    [{"pipe": 2, "tensor": 2}, {"shard": 2, "context": 2}, {}],
    [{"context": 2, "tensor": 2}, {}, {"pipe": 2, "tensor": 2}],
    [{"shard": 2, "pipe": 2, "tensor": 2}, {"data": 2, "shard": 2, "context": 2}, {"data": 2, "pipe": 2, "tensor": 2}],
    [{"data": 2, "shard": 2, "tensor": 2}, {"shard": 2, "tensor": 2}, {"shard": 2, "pipe": 2, "tensor": 2}],
    [{"expert": 2}, {}, {"data": 2, "expert": 2}],
    [{}, {"shard": 2, "expert": 2}, {"expert": 2}],
    [{"data": 1, "expert": 4}, {"expert": 2}, {}],
]


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_continues_on_another_mesh_and_in_one_process(chain: list[Any], tmp_path: Path) -> None:
    has_experts = any("expert" in mesh for mesh in chain)
    straight = resumed(str(tmp_path / "straight"), len(chain), {}, has_experts)
    found: list[Any] = []
    for epochs, mesh in enumerate(chain, 1):
        ranks(math.prod(mesh.values())).stop()
        run = ranks(math.prod(mesh.values())) if mesh else lambda call, *given: [call(*given)]
        found = run(resumed, str(tmp_path / "cut"), epochs, mesh, has_experts)
    for rank in found:
        assert rank["updates"] == straight["updates"]
        assert apart(rank["weights"], straight["weights"]) < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# Refused


class Counts(kit.MeshBlock):
    """A block that writes down its number of heads."""

    heads = kit.HEADS


class Wrong(kit.MeshBlock):
    """A block that fails whatever is divided."""

    heads = 3


class CountsHeads(kit.MeshWords):
    block = Counts


class CountsWrongly(kit.MeshWords):
    block = Wrong


def counted(task: type[kit.MeshWords]) -> None:
    kit.fit_mesh({"shard": 1, "tensor": 2}, [], task)


def test_a_block_that_counts_its_heads_is_named_with_its_line_and_the_cure() -> None:
    errors = [each for each in ranks(2).errors(counted, CountsHeads) if "PeerFailed" not in each]
    assert errors
    for each in errors:
        assert each.startswith(
            "TaskError: tensor_parallel: blocks.0 runs with whole layers, and fails with 1/2 of q, k, v, o, fc1, "
        )
        assert "mesh_kit.py:" in each
        assert "part(y).view(batch, length, self.heads" in each
        assert "view(batch, length, -1, head_size)" in each


@pytest.mark.slow
def test_a_block_that_fails_with_whole_layers_too_keeps_its_own_error() -> None:
    errors = [each for each in ranks(2).errors(counted, CountsWrongly) if "PeerFailed" not in each]
    assert errors
    assert all(each.startswith("RuntimeError: shape") for each in errors)


def test_a_mesh_in_one_process_is_refused() -> None:
    plugins: list[Any] = [FSDP(), TensorParallel(plan=kit.PLAN)]
    trainer = forge.Trainer(max_updates=1, device="cpu", run_dir=False, plugins=plugins, mesh={"shard": 2, "tensor": 2})
    with pytest.raises(StackError, match="1 processes cannot be arranged as shard 2 x tensor 2"):
        trainer.fit(kit.MeshWords(), kit.sentences())
