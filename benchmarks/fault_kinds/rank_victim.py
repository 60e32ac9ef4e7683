"""A small run on several ranks that can be killed: every strategy, and two kinds of checkpoints.

Ranks are forked from a process that has torch loaded, and started as srun starts them: rank 0 keeps the store, nobody
ends one because of another. Each rank is a node of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import forge
from benchmarks.fault_kinds.victim import Countdown, count_down, count_system_calls, exit_code
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.pipeline import Pipeline
from forge_cluster.staged import Staged
from forge_cluster.zero import Zero
from forge_plugins import DDP, EMA, FSDP, Accumulate, Checkpoint, Clip, Schedule, TensorParallel
from tests.support.free_port import free_port
from tests.support.mesh_kit import PLAN, MeshWords, sentences

UPDATES, WINDOW = 12, 2
PATIENCE = 150.0
"""Seconds after which an attempt hangs; one takes a few."""
EVERY = 2
"""Updates between two checkpoints; of staged states too, with a checkpoint every third time."""
PAUSE = 0.02
"""Seconds that a slow rank is stopped, and then runs."""
KINDS = ("plain", "staged")
COUNTED, MANY = ("micro-batch", "write"), 10**9
"""Kinds of calls, and more than a run makes."""


@dataclass(frozen=True, slots=True)
class Several:
    """A strategy: the mesh, and its plugins."""

    mesh: dict[str, int]
    plugins: Callable[[], list[Any]]

    @property
    def world(self) -> int:
        count = 1
        for size in self.mesh.values():
            count *= size
        return count


def _tensor() -> Any:
    return TensorParallel(plan=PLAN)


def _pipe() -> Any:
    return Pipeline(microbatches=2)


STRATEGIES: dict[str, Several] = {
    "ddp": Several({"data": 2}, lambda: [DDP()]),
    "zero1": Several({"data": 2}, lambda: [Zero(stage=1)]),
    "zero2": Several({"data": 2}, lambda: [Zero(stage=2)]),
    "fsdp": Several({"shard": 2}, lambda: [FSDP()]),
    "tensor_parallel": Several({"tensor": 2}, lambda: [FSDP(), _tensor()]),
    "pipeline": Several({"pipe": 2}, lambda: [_pipe()]),
    "context_parallel": Several({"context": 2}, lambda: [DDP(), ContextParallel()]),
    "data.shard": Several({"data": 2, "shard": 2}, lambda: [FSDP()]),
    "data.pipe": Several({"data": 2, "pipe": 2}, lambda: [_pipe()]),
    "data.context": Several({"data": 2, "context": 2}, lambda: [Zero(stage=1), ContextParallel()]),
    "shard.tensor": Several({"shard": 2, "tensor": 2}, lambda: [FSDP(reduce="micro"), _tensor()]),
    "shard.pipe": Several({"shard": 2, "pipe": 2}, lambda: [_pipe()]),
    "shard.context": Several({"shard": 2, "context": 2}, lambda: [FSDP(), ContextParallel()]),
    "pipe.tensor": Several({"pipe": 2, "tensor": 2}, lambda: [_pipe(), _tensor()]),
    "context.tensor": Several({"context": 2, "tensor": 2}, lambda: [FSDP(), ContextParallel(), _tensor()]),
}
"""By name; meshes of two axes by their axes."""


@dataclass(frozen=True, slots=True)
class RankDeath:
    """Who dies, and when."""

    moment: str
    "micro-batch, write (a system call of the process) or instant."
    rank: int
    everyone: bool
    "Whether all ranks are killed, right after this one."
    after: float
    "Calls until the kill; for an instant, seconds since the first micro-batch."
    throttled: int | None = None
    "A rank that is stopped for half of the time."


class Fate:
    """What this process is for; on a class, as what a task has is part of its run."""

    attempt: ClassVar[Path]
    death: ClassVar[RankDeath | None] = None
    begun: ClassVar[bool] = False


def note_resumed(trainer: forge.Run) -> None:
    (Fate.attempt / "resumed").write_text(f"{trainer.resumed_from or 0}")


class KilledWords(MeshWords):
    """A task that can be killed in its step. From the first one on calls count: all ranks have joined."""

    def training_step(self, batch: Any) -> Any:
        if not Fate.begun:
            Fate.begun = True
            assert self.trainer is not None
            note_resumed(self.trainer)
            (Fate.attempt / "begun").touch()
            Countdown.calls.update(dict.fromkeys(COUNTED, MANY) | {"owner": os.getpid()})
            if Fate.death is not None and Fate.death.moment in COUNTED:
                Countdown.calls[Fate.death.moment] = int(Fate.death.after)
        count_down("micro-batch")
        return super().training_step(batch)


class CountsCalls(forge.Plugin):
    """Writes down how many calls of each kind this rank made, at the end of a run that is not killed."""

    observer = True

    def __init__(self, file: Path):
        super().__init__()
        self.file = file

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        self.file.write_text(json.dumps({kind: MANY - Countdown.calls.get(kind, MANY) for kind in COUNTED}))


def train_rank(strategy: str, kind: str, place: Path, attempt: Path) -> None:
    """Train on this rank from the newest state."""
    torch.set_num_threads(1)
    several, rank = STRATEGIES[strategy], os.environ["RANK"]
    seldom = EVERY if kind == "plain" else 3 * EVERY
    saves: list[Any] = [Checkpoint(every=f"{seldom} updates", keep=2, rehearse="off")]
    if kind == "staged":
        saves.append(Staged(f"{EVERY} updates", folder=f"{place}/{{node}}"))
    levers = [Accumulate(WINDOW), Clip(0.05), EMA(0.9), Schedule("linear"), CountsCalls(attempt / f"calls-{rank}")]
    trainer = forge.Trainer(
        plugins=[*several.plugins(), *levers, *saves],
        mesh=several.mesh,
        max_updates=UPDATES,
        seed=0,
        device="cpu",
        run_dir=place / "run",
        resume="auto",
        log_every=2,
        validate_every=None,
    )
    task = KilledWords()
    trainer.fit(task, sentences(sizes=(8, 6, 8, 3) * (UPDATES * WINDOW // 4)))
    note_resumed(trainer)
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    torch.save(weights, attempt / f"end-{rank}")


def note_states(file: Path) -> None:
    """Note every state once it has its final name, on shared storage or on a node: from then on it may not be lost."""
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def move(source: Any, target: Any, _real: Callable[..., Any] = real, **options: Any) -> None:
            _real(source, target, **options)
            if re.fullmatch(r"update-\d+", Path(target).name):
                with file.open("a") as notes:
                    notes.write(f"{Path(target).name}\n")

        setattr(os, name, move)


@dataclass(slots=True)
class RankAttempt:
    """The processes of one attempt, from their start to their end."""

    strategy: str
    kind: str
    place: Path
    number: int = 0

    @property
    def folder(self) -> Path:
        return self.place / f"attempt-{self.number}"

    def run(self, death: RankDeath | None = None) -> list[int]:
        """Start all ranks, kill as planned, wait for the rest; return the exit codes."""
        self.folder.mkdir(parents=True)
        world = STRATEGIES[self.strategy].world
        port = free_port()
        children = [self._fork(rank, world, port, death) for rank in range(world)]
        deadline = time.monotonic() + PATIENCE
        if death is not None:
            slow = () if death.throttled is None else (children[death.throttled],)
            threads = [threading.Thread(target=_throttle, args=(child, deadline)) for child in slow]
            for thread in threads:
                thread.start()
            self._kill(children, death, deadline)
            for thread in threads:
                thread.join()
        return [exit_code(child, deadline) for child in children]

    def _fork(self, rank: int, world: int, port: int, death: RankDeath | None) -> int:
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            os.setsid()
            output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            os.environ.update({name: str(number) for name, number in numbers.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            faulthandler.enable()
            note_states(self.place / "states")
            count_system_calls()
            Fate.attempt, Fate.death = self.folder, death if death is not None and death.rank == rank else None
            train_rank(self.strategy, self.kind, self.place, self.folder)
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        os._exit(status)

    def _kill(self, children: list[int], death: RankDeath, deadline: float) -> None:
        """Kill at an instant; with everyone, the others as soon as the first is dead."""
        if death.moment == "instant":
            while not (self.folder / "begun").exists() and _lives(children[death.rank]):
                time.sleep(0.005)
            time.sleep(death.after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[death.rank], signal.SIGKILL)
        while death.everyone and _lives(children[death.rank]) and time.monotonic() < deadline:
            time.sleep(0.002)
        for child in children if death.everyone and _was_killed(children[death.rank]) else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def said(self) -> str:
        """What the ranks printed."""
        return (self.folder / "output").read_text(errors="replace")


def _throttle(child: int, deadline: float) -> None:
    """Let a process run for half of the time, while it lives."""
    while _lives(child) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(child, number)  # a process that has ended keeps its number until it is waited for
            time.sleep(PAUSE)


def _lives(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _was_killed(child: int) -> bool:
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended is not None and ended.si_code == os.CLD_KILLED
