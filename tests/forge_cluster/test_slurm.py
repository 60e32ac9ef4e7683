"""`forge launch` on a real SLURM cluster of three nodes on this host."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forge.checkpoint import Checkpoints
from forge.cli import main
from tests.support.patience import until
from tests.support.slurm_cluster import SlurmCluster, need_slurm, slurm_cluster

pytestmark = pytest.mark.slow
TASK = """
import time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import forge
from forge.data import Loader, Splits


class Noisy(forge.TaskModule):
    def __init__(self, pause: float = 0.0):
        super().__init__()
        self.pause = pause
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch):
        time.sleep(0 if self.trainer.resumed_from else self.pause)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)
    return Splits(train=Loader(TensorDataset(x, y), 8, shuffle=True))
"""
FIT = ["noisy.py:Noisy", "trainer.max_epochs=4", "trainer.seed=1", "-p", "no:tensorboard", "-p", "ddp"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    need_slurm()
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slurm") / "my work"
    folder.mkdir()
    (folder / "noisy.py").write_text(TASK)
    return folder


@pytest.fixture(autouse=True)
def stand_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def submit(cluster: SlurmCluster, name: str, *more: str) -> str:
    """Write a job of two nodes with `forge launch` and submit it; its number."""
    assert main(["launch", *FIT, "--nodes", "2", *more, "--run-dir", f"runs/{name}"]) == 0
    return sbatch(cluster, f"{name}.sbatch")


def sbatch(cluster: SlurmCluster, *words: str) -> str:
    done = cluster.run("sbatch", *words)
    assert done.returncode == 0, done.stderr
    return re.findall(r"\d+", done.stdout)[-1]


def await_checkpoint(name: str) -> None:
    until(Checkpoints(f"runs/{name}/checkpoints").all, f"no checkpoint of {name}")


@pytest.fixture(scope="module")
def straight(cluster: SlurmCluster, folder: Path) -> Path:
    """The weights of a run that nothing disturbed; every rank was started by srun itself, in one process of a node."""
    words = [sys.executable, "-m", "forge", "fit", *FIT, "--run-dir", "runs/straight"]
    done = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", f"--chdir={folder}", *words)
    assert done.returncode == 0, done.stderr
    return folder / "runs/straight"


def assert_same_end(name: str, straight: Path) -> None:
    ends = [load_file(f"{run}/weights.safetensors") for run in (straight, f"runs/{name}")]
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])
    card = json.loads(Path(f"runs/{name}/card.json").read_text())
    assert (card["world"], card["resumed_from"] in range(1, 32)) == (2, True)


def test_a_requeued_job_ends_in_the_same_bits(cluster: SlurmCluster, straight: Path) -> None:
    job = submit(cluster, "requeued", "checkpoint.every=4 updates", "task.pause=0.5")
    await_checkpoint("requeued")
    assert cluster.run("scancel", "--signal=USR1", job).returncode == 0  # as --signal does before the limit
    cluster.wait(job)
    said = Path(f"requeued-{job}.out").read_text()
    assert cluster.job(job)["Restarts"] == "1", said
    assert_same_end("requeued", straight)
    assert json.loads(Path("runs/requeued/card.json").read_text())["job"] == f"slurm:{job}"


@pytest.mark.parametrize(("victim", "requeues"), [("rank", "0"), ("node", "1")])
def test_what_was_killed_is_started_again_and_ends_in_the_same_bits(
    victim: str, requeues: str, cluster: SlurmCluster, straight: Path
) -> None:
    """A rank by the agents of both nodes, where they are; all processes of a node, its agent too, by a requeue."""
    job = submit(cluster, f"killed-{victim}", "checkpoint.every=4 updates", "task.pause=0.5", "--cpus", "3")
    await_checkpoint(f"killed-{victim}")
    assert cluster.job(job)["NumCPUs"] == "6"
    pids = cluster.run("scontrol", "listpids", job, "n2").stdout.splitlines()
    [agent] = [int(line.split()[0]) for line in pids[1:] if line.split()[2:5] == ["0", "0", "1"]]
    [rank, *_] = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
    for pid in [agent, rank] if victim == "node" else [rank]:
        os.kill(pid, signal.SIGKILL)
    cluster.wait(job)
    assert cluster.job(job)["Restarts"] == requeues, Path(f"killed-{victim}-{job}.out").read_text()
    assert_same_end(f"killed-{victim}", straight)


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: SlurmCluster, straight: Path) -> None:
    """By the commands that the page names: squeue, tail, scancel, and sbatch again."""
    job = submit(cluster, "stopped", "checkpoint.every=4 updates", "task.pause=0.5")
    await_checkpoint("stopped")
    assert job in cluster.run("squeue", "--me").stdout
    assert cluster.run("scancel", job).returncode == 0
    cluster.wait(job, ("CANCELLED",))
    until(lambda: not cluster.run("squeue", "-h", "-j", job).stdout.strip())
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert json.loads(Path("runs/stopped/end.json").read_text())["status"] == "interrupted"
    cluster.wait(sbatch(cluster, "stopped.sbatch"))
    assert_same_end("stopped", straight)
