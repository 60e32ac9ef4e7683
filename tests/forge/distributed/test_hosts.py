"""Several hosts: network namespaces with addresses of their own, with torchrun or SLURM's variables on each."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.checkpoint import Checkpoints
from tests.support.patience import PATIENCE

EXACT = 1e-11
"""The tolerance in float64: sums over samples are taken in another order, and nothing else."""
TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset

from forge.data import Loader, Splits
from forge.testing import TinyTask


class Slow(TinyTask):
    def __init__(self, pause: float = 0.0):
        super().__init__()
        self.pause = pause
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def training_step(self, batch):
        time.sleep(self.pause)
        return super().training_step(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 6, generator=generator).double(), torch.randint(3, (64,), generator=generator)
    return Splits(train=Loader(TensorDataset(x, y), 8, shuffle=True))
"""
_numbers = itertools.count(os.getpid() % 20000)


@dataclass
class Host:
    """One namespace with one address."""

    name: str
    address: str
    link: str
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Run a command there; what it says goes into a file named for the host."""
        environment = {
            **os.environ,
            **variables,
            "GLOO_SOCKET_IFNAME": self.link,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        log = (folder / f"{self.address}.log").open("a")
        command = ["ip", "netns", "exec", self.name, *words]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def join(self) -> None:
        _ip("-n", self.name, "link", "set", self.link, "up")

    def cut_off(self) -> None:
        _ip("-n", self.name, "link", "set", self.link, "down")

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts on one network."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("making network namespaces needs `ip` and root")
    number = next(_numbers)
    made = [Host(f"forge{number}h{i}", f"10.77.{number % 250}.{i + 1}", f"veth{i}") for i in range(2)]
    try:
        try:
            for host in made:
                _ip("netns", "add", host.name)
                _ip("-n", host.name, "link", "set", "lo", "up")
            first, second = made
            _ip("-n", first.name, "link", "add", first.link, "type", "veth", "peer", "name", second.link)
            _ip("-n", first.name, "link", "set", second.link, "netns", second.name)
            for host in made:
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
                host.join()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr}")
        yield made
    finally:
        for host in made:
            host.stop()


def torchrun(host: Host, first: Host, run: Path, strategy: str, updates: int, pause: float) -> list[str]:
    """The command of one host of a job of one or two."""
    launch = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    launch += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29400", f"--local-addr={host.address}"]
    launch += [f"--rdzv-conf=is_host={int(host is first)},keep_alive_interval=1,keep_alive_max_attempt=3"]
    launch += ["--rdzv-id=job", "--monitor-interval=0.2", "-m", "forge", "fit", "mine.py", "--run-dir", str(run)]
    return [sys.executable, *launch, *settings(strategy, updates, pause)]


def settings(strategy: str, updates: int, pause: float) -> list[str]:
    options = [f"task.pause={pause}", f"trainer.max_updates={updates}", "trainer.seed=3", "trainer.max_epochs=null"]
    options += ["trainer.device=cpu", "checkpoint.every=5 updates", "checkpoint.keep=100", "-p", strategy]
    return [*options, "--data", "mine.py:data"]


def wait_for(found: Any, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not found():
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < until, "the run does not get there"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_host_goes_on_alone_when_the_other_is_cut_off(strategy: str, hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    run, updates = tmp_path / "run", 60
    first, second = hosts
    jobs = [host.start(tmp_path, *torchrun(host, first, run, strategy, updates, 0.3)) for host in hosts]
    saved = Checkpoints(run / "checkpoints")
    try:
        wait_for(lambda: len(saved.all()) >= 2, jobs[0])
        together = forge.checkpoint.StoredCheckpoint(saved.all()[0]).load()
        assert len(together["rng"]) == 2
        second.cut_off()
        os.killpg(jobs[1].pid, signal.SIGKILL)  # nobody is left to answer, and no word of it comes through
        assert jobs[0].wait(PATIENCE) == 0
    except BaseException:
        for host in hosts:
            print(f"-- {host.address}\n{(tmp_path / f'{host.address}.log').read_text()[-6000:]}")
        raise
    last = forge.checkpoint.StoredCheckpoint(saved.path(updates)).load()
    assert len(last["rng"]) == 1

    straight = alone(tmp_path, updates)
    for name, value in straight.items():
        torch.testing.assert_close(last["model"][name], value, rtol=EXACT, atol=EXACT)


@pytest.mark.slow
def test_two_hosts_whose_names_nobody_knows_train_together(hosts: list[Host], tmp_path: Path) -> None:
    """As the files of `forge launch` start them: each host is found at its address on the way to the first."""
    (tmp_path / "mine.py").write_text(TASK)
    run, updates = tmp_path / "run", 10
    meet = ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"{hosts[0].address}:29400", "--run-dir", str(run)]
    command = [sys.executable, "-m", "forge", "fit", "mine.py", *meet, *settings("ddp", updates, 0)]
    jobs = [host.start(tmp_path, *command, FORGE_NODE_RANK=str(number)) for number, host in enumerate(hosts)]
    codes = [job.wait(PATIENCE) for job in jobs]
    assert codes == [0, 0], [(tmp_path / f"{host.address}.log").read_text()[-3000:] for host in hosts]
    last = forge.checkpoint.StoredCheckpoint(Checkpoints(run / "checkpoints").path(updates)).load()
    assert len(last["rng"]) == 2
    for name, value in alone(tmp_path, updates).items():
        torch.testing.assert_close(last["model"][name], value, rtol=EXACT, atol=EXACT)


def alone(folder: Path, updates: int) -> dict[str, torch.Tensor]:
    """The same run on one host, never interrupted."""
    options = [f"trainer.max_updates={updates}", "trainer.seed=3", "trainer.max_epochs=null", "trainer.device=cpu"]
    words = [sys.executable, "-m", "forge", "fit", "mine.py", "--run-dir", str(folder / "alone"), *options]
    subprocess.run([*words, "--data", "mine.py:data"], cwd=folder, check=True, capture_output=True)
    saved = Checkpoints(folder / "alone" / "checkpoints").path(updates)
    return forge.checkpoint.StoredCheckpoint(saved).load()["model"]
