"""The best weights of a run, by weights="best" or RUN:best, wherever weights of a run are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forge
from forge.checkpoint import StoredCheckpoint
from forge.testing import TinyTask, fit_tiny
from forge_plugins import Checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    best = Checkpoint(every="1 update", best={"monitor": "train/loss", "mode": "max", "keep": 1})  # not the last one
    fit_tiny([best], max_updates=4, run_dir=folder)
    return folder


def expected(run: Path) -> dict[str, torch.Tensor]:
    return StoredCheckpoint((run / "checkpoints" / "best").resolve()).load_weights(None)["model"]


def test_load_weights_takes_the_best(run: Path) -> None:
    for path, weights in ((run, "best"), (f"{run}:best", None), (f"{run}:best", "best")):
        task = TinyTask()
        report = forge.load_weights(task, path, weights=weights)
        assert report.source == (run / "checkpoints" / "best").resolve()
        for name, tensor in expected(run).items():
            assert torch.equal(task.state_dict()[name], tensor)


def test_load_takes_the_best_by_its_short_name(run: Path) -> None:
    task = forge.load(f"{run}:best", TinyTask)
    assert all(torch.equal(task.state_dict()[name], tensor) for name, tensor in expected(run).items())


def test_a_run_without_a_best_checkpoint_says_how_to_keep_one(tmp_path: Path) -> None:
    fit_tiny([Checkpoint(every="1 update")], max_updates=2, run_dir=tmp_path / "run")
    with pytest.raises(forge.TaskError, match=r"no best checkpoint. Train with checkpoint.best="):
        forge.load_weights(TinyTask(), tmp_path / "run", weights="best")
    with pytest.raises(forge.TaskError, match="no run folder"):
        forge.load_weights(TinyTask(), tmp_path / "nothing:best")
