"""LaunchJob: what runs, on how many nodes, with what on each."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import product
from math import prod
from typing import Any, ParamSpec

from forge.errors import ForgeError

PORT = 29400
"""The port of the rendezvous on the first node."""
MOST_JOBS = 10_000
"""Jobs of an array."""

P = ParamSpec("P")


def of_printable_lines(render: Callable[P, str]) -> Callable[P, str]:
    """Make a function that writes a job refuse what the job's file could take for something else than a value.

    A line break would begin a command, or a key. So every text, at every depth of the arguments, is one printable line;
    and one that is a word of its own does not begin with a dash, or it would be an option. What is left is quoted.
    """
    names = inspect.signature(render)

    @functools.wraps(render)
    def checked(*args: P.args, **kwargs: P.kwargs) -> str:
        for name, value in names.bind(*args, **kwargs).arguments.items():
            _refuse_odd(name, value)
        return render(*args, **kwargs)

    return checked


def _refuse_odd(name: str, value: Any) -> None:
    if is_dataclass(value):
        for field in fields(value):
            _refuse_odd(field.name, getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_odd(name, item)
    elif isinstance(value, str):
        what = NAMES.get(name, f"--{name.replace('_', '-')}")
        if not value.isprintable():
            raise ForgeError(f"{what} is {value[:80]!a}: it must be one line of printable signs. Change or rename it.")
        if value.startswith("-") and name not in WITH_DASHES:
            raise ForgeError(f"{what} is {value[:80]!r}: it must not begin with a dash, or it would be an option.")


NAMES = {
    "folder": "The working directory",
    "words": "A word of the command",
    "sweep": "--array",
    "more": "--option",
    "gpu_option": "--gpu-option",
}
WITH_DASHES = ("words", "more", "gpu_option", "time", "submit")
"""Values that may begin with a dash: words of `forge fit`, options of sbatch, what stands behind an = or in text."""


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
    env: tuple[str, ...] = ()
    "Variables of every rank: NAME=VALUE."
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
            ("--cpus", self.cpus if self.cpus is not None else 1, 1),
            ("--grace", self.grace, 1),
            ("--restarts", self.restarts, 0),
        ):
            if number < least:
                raise ForgeError(f"{option} is {number}; it must be at least {least}.")
        for pair in self.env:
            if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", pair):
                raise ForgeError(f"--env {pair!r}: write a variable and its value, as in --env NCCL_DEBUG=INFO.")

    @property
    def ranks(self) -> int:
        return self.nodes * self.procs

    @property
    def variables(self) -> dict[str, str]:
        """The variables of every rank, by name."""
        return dict(pair.split("=", 1) for pair in self.env)

    def with_env(self, command: str) -> str:
        """Return a command of a shell with the variables set for it."""
        return f"env {shlex.join(self.env)} {command}" if self.env else command

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
    count = prod(map(len, axes))
    if count > MOST_JOBS:
        raise ForgeError(f"--array makes {count:,} jobs; {MOST_JOBS:,} is the most. Give fewer values.")
    return tuple(product(*axes)) if axes else ()
