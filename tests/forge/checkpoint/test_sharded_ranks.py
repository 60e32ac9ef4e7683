"""Checkpoints of real ranks under FSDP2: the same bits on any number of ranks, and kills."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from forge.checkpoint import (
    BackgroundWriter,
    Checkpoints,
    StoredCheckpoint,
    Writers,
    manifest,
    placed_like,
    publish,
    write_sharded,
)
from forge.errors import CheckpointError
from tests.forge.checkpoint.test_checkpoint import check_folder, every_kill
from tests.forge.checkpoint.test_checkpoint import tree_of as plain_tree
from tests.forge.checkpoint.test_tree import same
from tests.forge.cli.test_ckpt import call  # noqa: F401 (a fixture)
from tests.support import sharded_kit
from tests.support.ranks import launch
from tests.support.sharded_kit import S1, R, spread, step, tree_of_net, whole, write_in_threads

saved = sharded_kit.saved


# -- real ranks: FSDP2 ------------------------------------------------------------------------------------------------


def load_by_others(rank: int, store: dist.Store, folder: Path, world: int) -> None:
    expected = StoredCheckpoint(folder / "expected").load()
    for how in ("fsdp", "hybrid", "tensor"):
        net = spread(how)
        optimizer = step(net)
        live = net.state_dict()
        loaded = StoredCheckpoint(folder / "update-00000002").load(place=placed_like(live))
        net.load_state_dict(loaded["model"])
        for parameter, name in [(p, n) for n, p in net.named_parameters()]:
            for key, value in loaded["optimizers"][""]["state"][name].items():
                if key != "step":
                    assert value.placements == live[name].placements, (how, name)
                optimizer.state[parameter][key] = value
        tree = {**tree_of_net(net, optimizer), "plugins": loaded["plugins"], "rng": loaded["rng"]}
        assert same(whole(tree), expected), how
        write_sharded(folder / how, tree, Writers(rank, world, store))
    dist.barrier()


def load_by_two(rank: int, store: dist.Store, folder: Path) -> None:
    expected = StoredCheckpoint(folder / "expected").load()
    net = spread("fsdp")
    for how in ("fsdp", "hybrid", "tensor"):
        loaded = StoredCheckpoint(folder / how).load(place=placed_like(net.state_dict()))
        assert same(whole(loaded), expected), how
    mesh = init_device_mesh("cpu", (2,))
    columns = {
        name: distribute_tensor(tensor, mesh, [S1 if tensor.ndim > 1 else R])
        for name, tensor in expected["model"].items()
    }
    loaded = StoredCheckpoint(folder / "tensor").load(place=placed_like(columns))
    for name, tensor in columns.items():
        assert same(loaded["model"][name].to_local(), tensor.to_local().contiguous())
    dist.barrier()


@pytest.mark.slow
def test_one_process_loads_what_two_fsdp_ranks_save(saved: Path) -> None:
    checkpoint = StoredCheckpoint(saved / "update-00000002")
    loaded = checkpoint.load()
    assert same(loaded, StoredCheckpoint(saved / "expected").load())
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]
    assert checkpoint.outline()["model"]["up.weight"].shape == (10, 4)
    content = json.loads((checkpoint.path / manifest.NAME).read_bytes())
    assert (content["version"], len(content["files"])) == (2, 5)
    sizes = {name: record["size"] for name, record in content["files"].items()}
    assert min(sizes["state-00001-of-00002.safetensors"], sizes["state-00002-of-00002.safetensors"]) > 1000
    plain = StoredCheckpoint(saved / "plain").load()
    assert same(plain["model"], {"w": torch.arange(6.0), "v": torch.ones(100)})
    assert plain["tied"]["w"] is plain["model"]["w"]
    assert plain["rank"] == 0  # what is no tensor is rank 0's


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_ranks_to_others_and_back_keep_every_bit(world: int, saved: Path) -> None:
    assert launch(world, load_by_others, saved, world) == [0] * world
    for how in ("fsdp", "hybrid", "tensor"):
        assert same(StoredCheckpoint(saved / how).load(), StoredCheckpoint(saved / "expected").load()), how
    assert launch(2, load_by_two, saved) == [0, 0]


# -- kills ------------------------------------------------------------------------------------------------------------


def killed_while_saving(rank: int, store: dist.Store, folder: Path, victim: int) -> None:
    writers = Writers(rank, 2, store)
    writer = BackgroundWriter(writers)
    writer.submit(folder / "update-00000001", plain_tree(1))
    writer.wait()
    if rank == victim:
        real = publish.write_file

        def deadly(path: Path, pieces: Any) -> Any:
            if path.name.startswith("state-"):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(path, pieces)

        publish.write_file = deadly
    writer.submit(folder / "update-00000002", plain_tree(2))
    with pytest.raises(CheckpointError, match="because the run has failed on some rank"):
        writer.wait()
    assert not (folder / "update-00000002").exists()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_save_leaves_the_old_checkpoint(victim: int, tmp_path: Path) -> None:
    codes = launch(2, killed_while_saving, tmp_path, victim)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 0
    assert [path.name for path in Checkpoints(tmp_path).all()] == ["update-00000001"]
    Checkpoints(tmp_path).sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]
    assert same(StoredCheckpoint(tmp_path / "update-00000001").load(), plain_tree(1))


def test_a_save_of_two_ranks_killed_anywhere_is_there_or_not(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_in_threads(folder / "update-00000001", 1)

    seen = set()
    for folder in every_kill(tmp_path, prepare, lambda folder: write_in_threads(folder / "update-00000002", 2)):
        published = (folder / "update-00000002").exists()
        check_folder(folder)
        newest = Checkpoints(folder).newest_valid()
        assert newest is not None
        assert same(newest.load(), plain_tree(2 if published else 1))
        seen.add(published)
    assert seen == {True, False}
