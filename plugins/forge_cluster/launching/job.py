"""LaunchJob: what runs, on how many nodes, with what on each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from forge.errors import ForgeError

PORT = 29400
"""The port of the rendezvous on the first node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """One job for a cluster, or one per combination of `sweep`."""

    name: str
    words: tuple[str, ...]
    "The arguments of `forge fit`: recipe, overrides, plugins."
    run_dir: str
    "The run folder, on a file system that all nodes share."
    nodes: int = 1
    gpus: int = 0
    "GPUs of each node."
    procs: int = 1
    "Processes of each node."
    cpus: int | None = None
    "Cores of each process."
    memory: str | None = None
    "Memory of each node, in the system's own form."
    python: str = "python"
    folder: str = "."
    "The working directory of the job."
    grace: int = 120
    "Seconds between the signal and the end of a preempted job."
    restarts: int = 3
    "Restarts from the last checkpoint after a crash, where the system counts them."
    sweep: tuple[tuple[str, ...], ...] = ()
    "Overrides, one tuple for each job of an array."

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", self.name):
            raise ForgeError(
                f"--name {self.name!r}: use up to 42 lower-case letters, digits and hyphens, no other signs."
            )
        for option, number, least in (
            ("--nodes", self.nodes, 1),
            ("--gpus", self.gpus, 0),
            ("--procs", self.procs, 1),
            ("--grace", self.grace, 1),
            ("--restarts", self.restarts, 0),
        ):
            if number < least:
                raise ForgeError(f"{option} is {number}; it must be at least {least}.")

    @property
    def ranks(self) -> int:
        return self.nodes * self.procs

    def node_command(self, endpoint: str = "", number: str = "") -> str:
        """Return the command that starts all ranks of one node, for a shell.

        `endpoint` is the first node and `number` the index of this one, both as text of the shell.
        """
        fit = [self.python, "-m", "forge", "fit", *self.words, "--run-dir", self.run_dir, "--resume"]
        words = shlex.join(fit)
        if self.ranks == 1:
            return words
        words += f" --nproc {self.procs} --max-restarts {self.restarts}"
        if self.nodes == 1:
            return words
        words += f" --nnodes {self.nodes} --rdzv-endpoint {endpoint}:{PORT}"
        return f"env FORGE_NODE_RANK={number} {words}" if number else words


def parse_sweep(texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the combinations of `task.lr=1e-3,1e-2` and `task.hidden=64,256` as overrides."""
    axes = []
    for text in texts:
        key, found, values = text.partition("=")
        given = [value for value in values.split(",") if value]
        if not found or not key or not given:
            raise ForgeError(f"--array {text!r}: write a key and its values, as in --array task.lr=1e-3,1e-2.")
        axes.append([f"{key}={value}" for value in given])
    return tuple(product(*axes)) if axes else ()
