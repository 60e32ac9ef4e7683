"""RankInfo: rank and world size of this process, read from the variables of torchrun or SLURM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from forge import registry
from forge.errors import ForgeError, StackError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
PORTS = range(15000, 20000)
"""Ports of rank 0 under SLURM, chosen by job id, so that two jobs on one host do not collide."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One of `world` processes."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str | None = None
    "The host of rank 0; None for one process without a launcher."
    port: int = 0
    by_task: bool = False
    "Whether SLURM started this process as a task, so that it may have bound a GPU to it."

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> RankInfo:
        """Read torchrun's variables, else those of an `srun` with several tasks, else return one process."""
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return cls._from_torchrun(environment)
        if "SLURM_STEP_ID" in environment and _number(environment, "SLURM_NTASKS", 1) > 1:
            return cls._from_slurm(environment)
        return cls()

    @classmethod
    def _from_torchrun(cls, environment: Mapping[str, str]) -> RankInfo:
        missing = [name for name in TORCHRUN if name not in environment]
        if missing:
            raise ForgeError(
                f"The environment sets RANK but not {', '.join(missing)}. Start with `forge fit ... --nproc N` or "
                "`torchrun --nproc-per-node N -m forge fit ...`, which set all of them, or unset RANK."
            )
        return cls(
            _number(environment, "RANK"),
            _number(environment, "WORLD_SIZE"),
            _number(environment, "LOCAL_RANK"),
            environment["MASTER_ADDR"],
            _number(environment, "MASTER_PORT"),
        )

    @classmethod
    def _from_slurm(cls, environment: Mapping[str, str]) -> RankInfo:
        missing = [name for name in SLURM if name not in environment]
        if missing:
            raise ForgeError(f"SLURM started this step without {', '.join(missing)}. Start it with srun.")
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
        job = _number(environment, "SLURM_JOB_ID", 0)
        return cls(
            _number(environment, "SLURM_PROCID"),
            _number(environment, "SLURM_NTASKS"),
            _number(environment, "SLURM_LOCALID"),
            environment.get("MASTER_ADDR") or first_host(nodes),
            _number(environment, "MASTER_PORT", PORTS[job % len(PORTS)]),
            by_task=True,
        )


def first_host(nodes: str) -> str:
    """Return the first of SLURM's list of hosts: node017 of `node[017-020,031],login1`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise ForgeError(f"SLURM's list of nodes {nodes!r} names no host. Set MASTER_ADDR.")
    return match[1] + (match[2] or "")


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ForgeError(f"The environment variable {name} is {text!r}; it must be a whole number.") from error


def refuse_alone(world: int) -> None:
    """Refuse several processes without a strategy: each would train alone and overwrite the others' files."""
    processes = RankInfo.read().world
    if world == 1 < processes:
        raise StackError(
            f"This is one of {processes} processes (by WORLD_SIZE or SLURM_NTASKS), but nothing in this stack joins "
            f"them: each would train alone and overwrite the others' files.{registry.advice('processes', ' Add {}.')} "
            "For independent runs, unset that variable."
        )
