"""Checkpoints of real ranks under FSDP2: one process loads them to the same bits, and kills."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from forge import load_weights
from forge.checkpoint import (
    BackgroundWriter,
    Checkpoints,
    StoredCheckpoint,
    Writers,
    manifest,
    publish,
)
from forge.errors import CheckpointError
from tests.forge.checkpoint.test_checkpoint import check_folder, every_kill, newest_of
from tests.forge.checkpoint.test_checkpoint import tree_of as plain_tree
from tests.forge.checkpoint.test_tree import same
from tests.support import sharded_kit
from tests.support.ranks import launch
from tests.support.sharded_kit import Net, write_in_threads

saved = sharded_kit.saved


# -- real ranks: FSDP2 ------------------------------------------------------------------------------------------------


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


def test_the_weights_of_a_sharded_checkpoint_load_like_any_other(saved: Path) -> None:
    weights = StoredCheckpoint(saved / "expected").weights()
    for source in ("update-00000002", "weights.safetensors"):
        if source.startswith("update"):  # a forge checkpoint of a task tells its class
            assert same(StoredCheckpoint(saved / source).weights(), weights)
        else:
            net = Net()
            load_weights(net, saved / source)
            assert same(dict(net.state_dict()), weights)
    assert set(load_file(saved / "weights.safetensors")) == weights.keys() - {"head.weight"}


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
        write_in_threads(folder / "update-00000001", plain_tree(1))

    seen = set()
    for folder in every_kill(
        tmp_path, prepare, lambda folder: write_in_threads(folder / "update-00000002", plain_tree(2))
    ):
        published = (folder / "update-00000002").exists()
        check_folder(folder)
        assert same(newest_of(folder), plain_tree(2 if published else 1))
        seen.add(published)
    assert seen == {True, False}
