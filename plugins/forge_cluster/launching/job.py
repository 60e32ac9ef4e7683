"""LaunchJob: what runs, on how many nodes, with what on each."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import PurePosixPath

from forge.distributed.launch import NODE_RANK
from forge.errors import ForgeError

PORT = 29400
"""The port of the rendezvous on the first node, where a job does not share it with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """One job of a cluster. Every text in it is one printable line: a line break would begin a command, or a key."""

    name: str
    words: tuple[str, ...]
    "The arguments of `forge fit`: recipe, overrides, plugins."
    run_dir: str
    "The run folder, on a file system that all nodes share."
    nodes: int = 1
    gpus: str = ""
    "GPUs of each node: a number, or a name and a number as in H100:8."
    procs: int = 1
    "Processes of each node."
    cpus: int | None = None
    "Cores of each process."
    python: str = "python"
    folder: str = "."
    "The working directory of the job."
    grace: int = 120
    "Seconds between the signal and the end of a preempted job."
    restarts: int = 3
    "Restarts from the last checkpoint after a crash."
    time: str | None = None
    "SLURM: the time limit, after which the job is queued again."
    options: tuple[str, ...] = ()
    "SLURM: options of sbatch, as its file has them."
    image: str | None = None
    "Kubernetes and SkyPilot: the container image with forge and the user's code."
    claim: str | None = None
    "Kubernetes and SkyPilot: the volume that all nodes mount as the folder of run folders."

    def __post_init__(self) -> None:
        for name, least in {"nodes": 1, "procs": 1, "cpus": 1, "grace": 1, "restarts": 0}.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise ForgeError(f"--{name} is {number}; it must be at least {least}.")
        for field in fields(self):
            value = getattr(self, field.name)
            for text in value if isinstance(value, tuple) else [value]:
                if isinstance(text, str) and not text.isprintable():
                    raise ForgeError(
                        f"{field.name} of the job is {text[:80]!a}: it must be one line of printable signs."
                    )

    def volumes(self) -> dict[str, str]:
        """Return the claim by the folder where all nodes mount it, which is the one that the run folder is in."""
        folder = PurePosixPath(self.run_dir).parent
        if self.claim is None and self.nodes > 1:
            raise ForgeError(
                f"{self.nodes} nodes write one run folder together: name the volume they share by --claim."
            )
        if self.claim is not None and not (folder.is_absolute() and folder.name):
            raise ForgeError(f"--run-dir {self.run_dir}: with --claim it is a folder in the volume: /runs/{self.name}.")
        return {} if self.claim is None else {str(folder): self.claim}

    def node_command(self, first: str, number: str) -> str:
        """Return the command of a shell that starts all ranks of one node.

        `first` is HOST:PORT of the first node and `number` the index of this one, both as text of that shell.
        """
        fit = shlex.join([self.python, "-m", "forge", "fit", *self.words, "--run-dir", self.run_dir, "--resume"])
        fit += f" --nproc {self.procs} --max-restarts {self.restarts}"
        if self.nodes == 1:
            return f"exec {fit}"
        return f"exec env {NODE_RANK}={number} {fit} --nnodes {self.nodes} --rdzv-endpoint {first}"
