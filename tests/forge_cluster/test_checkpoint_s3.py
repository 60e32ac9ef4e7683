"""checkpoint.remote against a real S3 server (moto's), reached through a proxy that cuts and refuses connections."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.checkpoint import StoredCheckpoint
from forge.testing import assert_same
from forge_cluster.storage.remote import RemoteCheckpoints
from forge_plugins import DDP
from forge_plugins.checkpoint import Checkpoint
from tests.forge_cluster.test_checkpoint_remote import Dropping
from tests.support.ranks import launch
from tests.support.s3_server import Proxy, s3_server
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.slow
pytest.importorskip("s3fs", reason="needs s3fs")
__all__ = ["s3_server"]
PLACE = "s3://bucket/runs/first"


def train(run: Path, updates: int, url: str | None = PLACE, plugins: tuple[Any, ...] = ()) -> Classifier:
    torch.manual_seed(3)
    task = Dropping(hidden=64)
    checkpoint = Checkpoint(every="1 updates", keep=2, remote=url)
    options: dict[str, Any] = {"max_epochs": None, "max_updates": updates, "seed": 1, "resume": "auto"}
    fit(task, make_batches(4), run_dir=run, plugins=[checkpoint, *plugins], **options)
    return task


@pytest.mark.parametrize("cut", [0, 2, 3])
def test_an_empty_machine_resumes_from_s3_in_the_same_bits(s3_server: Proxy, cut: int, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 5, None)
    s3_server.cut = cut
    train(tmp_path / "one", 3)
    shutil.rmtree(tmp_path / "one")
    assert_same(train(tmp_path / "two", 5), straight)
    s3_server.cut = 0
    place = RemoteCheckpoints(PLACE)
    assert place.newest() == 5
    assert bool(s3_server.cuts) == bool(cut)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"testing-secret" not in written
    assert b"testing-key" not in written


def _as_rank(rank: int, store: Any, folder: Path, updates: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    train(folder, updates, plugins=(DDP(),))


def test_what_ranks_wrote_is_uploaded_and_one_process_goes_on(s3_server: Proxy, tmp_path: Path) -> None:
    assert launch(2, _as_rank, tmp_path / "two", 3) == [0, 0]
    place = RemoteCheckpoints(PLACE)
    assert place.newest() == 3
    assert (
        len(place._fs.ls(f"{place._root}/update-00000003")) == 6
    )  # two files of each rank, the document, the manifest
    place.fetch(3, tmp_path / "fetched/update-00000003")
    StoredCheckpoint(tmp_path / "fetched/update-00000003").verify()
    shutil.rmtree(tmp_path / "two")
    train(tmp_path / "two", 4)
    assert place.newest() == 4
