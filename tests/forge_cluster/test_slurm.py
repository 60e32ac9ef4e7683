"""`forge launch slurm` on a real SLURM cluster of two nodes on this host."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forge.checkpoint import Checkpoints
from forge.cli import main
from tests.support.patience import PATIENCE
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
    def __init__(self, pause: float = 0.0, lr: float = 0.01):
        super().__init__()
        self.pause, self.lr = pause, lr
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch):
        time.sleep(self.pause)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)
    return Splits(train=Loader(TensorDataset(x, y), 8, shuffle=True))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    need_slurm()
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


def submit(cluster: SlurmCluster, folder: Path, name: str, *more: str) -> str:
    """Write a job with `forge launch` and submit it; its number."""
    (folder / "noisy.py").write_text(TASK)
    words = ["noisy.py:Noisy", "trainer.max_epochs=4", "trainer.seed=1", "-p", "no:tensorboard", "--name", name, *more]
    assert main(["launch", "slurm", *words, "--run-dir", f"runs/{name}", "--python", sys.executable]) == 0
    done = cluster.run("sbatch", f"{name}.sbatch")
    assert done.returncode == 0, done.stderr
    return re.findall(r"\d+", done.stdout)[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def await_checkpoint(folder: Path, name: str, job: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not Checkpoints(folder / f"runs/{name}/checkpoints").all():
        assert time.monotonic() < deadline, (folder / f"{name}-{job}.out").read_text()
        time.sleep(0.1)


def test_a_requeued_job_on_two_nodes_ends_in_the_same_bits(cluster: SlurmCluster, folder: Path) -> None:
    two = ["-p", "ddp", "--nodes", "2", "checkpoint.every=4 updates"]
    straight = submit(cluster, folder, "straight", *two)
    cluster.wait(straight)
    job = submit(cluster, folder, "requeued", *two, "task.pause=0.5")
    await_checkpoint(folder, "requeued", job)
    assert cluster.run("scancel", "--signal=USR1", job).returncode == 0  # as --signal does before the limit
    cluster.wait(job)
    assert cluster.job(job)["Restarts"] == "1"
    assert json.loads((folder / "runs/requeued/card.json").read_text())["resumed_from"] in range(1, 32)
    ends = [load_file(folder / f"runs/{name}/weights.safetensors") for name in ("straight", "requeued")]
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])


def test_a_job_at_slurms_own_limit_ends_in_the_same_bits(cluster: SlurmCluster, folder: Path) -> None:
    """SLURM itself sends the signal, up to half a minute early, since it looks at limits that often."""
    two = ["-p", "ddp", "--nodes", "2", "checkpoint.every=1000 updates"]  # only the signal makes it save
    cluster.wait(submit(cluster, folder, "whole", *two))
    job = submit(cluster, folder, "limited", *two, "task.pause=2.5", "--time", "00:02:00", "--grace", "40")
    assert cluster.job(job)["TimeLimit"] == "00:02:00"
    cluster.wait(job)
    said = (folder / f"limited-{job}.out").read_text()
    assert int(cluster.job(job)["Restarts"]) >= 1, said
    assert json.loads((folder / "runs/limited/card.json").read_text())["resumed_from"] in range(1, 32), said
    assert "DUE TO TIME LIMIT" not in said
    ends = [load_file(folder / f"runs/{name}/weights.safetensors") for name in ("whole", "limited")]
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])


def test_a_killed_task_is_tried_again_on_another_node_and_ends_in_the_same_bits(
    cluster: SlurmCluster, folder: Path
) -> None:
    two = ["-p", "ddp", "--nodes", "2", "checkpoint.every=4 updates"]
    cluster.wait(submit(cluster, folder, "undisturbed", *two))
    job = submit(cluster, folder, "killed", *two, "task.pause=0.5")
    await_checkpoint(folder, "killed", job)
    assert cluster.job(job)["ExcNodeList"] == "(null)"
    pids = cluster.run("scontrol", "listpids", job, "n2").stdout.splitlines()
    [victim] = [int(line.split()[0]) for line in pids[1:] if line.split()[2:5] == ["0", "0", "1"]]
    os.kill(victim, signal.SIGKILL)
    cluster.wait(job)
    said = (folder / f"killed-{job}.out").read_text()
    assert "Left out from now on: n2." in said
    assert cluster.job(job)["Restarts"] == "1", said
    assert cluster.job(job)["ExcNodeList"] == "n2"
    assert cluster.job(job)["NodeList"] == "n[1,3]"
    ends = [load_file(folder / f"runs/{name}/weights.safetensors") for name in ("undisturbed", "killed")]
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])


def test_tasks_get_their_cores(cluster: SlurmCluster, folder: Path) -> None:
    job = submit(cluster, folder, "cores", "--cpus", "3")
    cluster.wait(job)
    script = (folder / "cores.sbatch").read_text()
    asked = "echo $SLURM_CPUS_PER_TASK > "
    [fit] = re.findall(r"srun --kill-on-bad-exit=0 (.*) --resume", script)
    (folder / "cores.sbatch").write_text(script.replace(fit, f"sh -c '{asked} cores' -"))
    cluster.wait(re.findall(r"\d+", cluster.run("sbatch", "cores.sbatch").stdout)[-1])
    assert (folder / "cores").read_text() == "3\n"


def test_an_array_runs_one_job_for_each_value(cluster: SlurmCluster, folder: Path) -> None:
    job = submit(cluster, folder, "grid", "--array", "task.lr=0.01,0.1")
    deadline = time.monotonic() + PATIENCE
    while not all((folder / f"runs/grid/{number}/weights.safetensors").exists() for number in (0, 1)):
        assert time.monotonic() < deadline, [path.read_text() for path in folder.glob("grid-*.out")]
        time.sleep(0.2)
    cards = [(folder / f"runs/grid/{number}/card.json").read_text() for number in (0, 1)]
    assert '"lr": 0.01' in cards[0]
    assert '"lr": 0.1' in cards[1]
    assert (folder / f"grid-{job}_0.out").exists()
