"""A SLURM cluster of several nodes on this host: real slurmctld, slurmd and munged, in a folder of their own.

It needs root and Debian's packages slurm-wlm and munge. The names of its nodes are known to SLURM alone, as on many
real clusters, so that nothing in a test can resolve them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.free_port import free_port
from tests.support.patience import PATIENCE, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "srun", "scontrol", "squeue")
CONFIGURATION = """
ClusterName=forge
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MpiDefault=none
KillWait=5
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=60 State=UP
"""


def need_slurm() -> None:
    """Skip the test where SLURM cannot run."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        pytest.skip(f"needs SLURM (apt-get install slurm-wlm munge): {', '.join(missing)} not found")
    if os.geteuid():
        pytest.skip("needs root: slurmd starts the tasks of jobs")


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass
class SlurmCluster:
    """A running cluster."""

    folder: Path
    nodes: int

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user of the cluster: this process's, with the `forge` of its Python first."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{_path()}"
        return {**own, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def run(self, *words: str | Path, timeout: float = PATIENCE, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **more}
        return subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, timeout=timeout)

    def job(self, number: str) -> Mapping[str, str]:
        """What `scontrol show job` says of a job."""
        said = self.run("scontrol", "--oneliner", "show", "job", number)
        assert said.returncode == 0, said.stderr
        return dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)

    def wait(self, number: str, states: tuple[str, ...] = ("COMPLETED",)) -> None:
        """Wait until a job is in one of these states; fail if it ends in another."""

        def has_ended() -> bool:
            state = (job := self.job(number))["JobState"]
            assert state in (*states, "PENDING", "RUNNING", "SIGNALING", "COMPLETING", "CONFIGURING"), job
            return state in states

        until(has_ended, f"job {number} does not end")


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 2) -> Iterator[SlurmCluster]:
    """Start a cluster; end its daemons, and theirs alone, afterwards."""
    cluster = SlurmCluster(folder, nodes)
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname()
    text = CONFIGURATION.format(host=host, folder=folder, nodes=nodes, controller=free_port())
    for number in range(1, nodes + 1):
        text += f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=4000\n"
    (folder / "slurm.conf").write_text(text)
    conf, started = folder / "slurm.conf", []

    def start(*words: str | Path) -> None:
        output = open(folder / f"{Path(words[0]).name}.out", "a")  # noqa: SIM115
        started.append(subprocess.Popen(list(map(str, words)), env=cluster.environment, stdout=output, stderr=output))
        output.close()

    try:
        subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], env=cluster.environment, check=True)
        start(
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(
                f"--{name}={folder}/munge.{name.split('-')[0]}"
                for name in ("socket", "pid-file", "log-file", "seed-file")
            ),
        )
        until((folder / "munge.socket").exists, f"munged does not start: {folder}")
        start("slurmctld", "-D", "-f", conf)
        for number in range(1, nodes + 1):
            start("slurmd", "-D", "-f", conf, "-N", f"n{number}")
        idle = [str(nodes), "idle"]
        until(lambda: cluster.run("sinfo", "-h", "-o", "%D %t").stdout.split() == idle, f"no cluster: {folder}")
        yield cluster
        cluster.run("scancel", "--state=PENDING", "--state=RUNNING", "--full")
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)  # limit: it is killed then: nothing is asserted
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
