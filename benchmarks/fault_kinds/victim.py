"""A small run that can be killed, signalled or given faults, in a process forked from one that has torch loaded."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import forge
import forge_plugins
from benchmarks.fault_kinds import preload
from benchmarks.stranger_optimizers import optimizer_of
from forge.data import Loader
from forge.snapshot.evidence import traced

UPDATES = 18
WORKERS = ("0 workers", "2 workers", "2 persistent")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SEEDS = 6
"""Number of uninterrupted runs per precision, to compare the others with."""
PRECISIONS = ("float32", "bf16", "fp16")
"""Used by cases in turn."""
PATIENCE = 120.0
"""Seconds after which an attempt hangs; one takes less than a second."""
HANG = -1000
"""The exit code that `spawn` returns for an attempt that hangs."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Points with noise from all three random generators."""

    def __init__(self, length: int = 62):
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(length, 8, generator=generator)
        self.labels = torch.randint(3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(8) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return self.points[index] + noise, self.labels[index]


class Victim(forge.TaskModule):
    """A network with dropout, batch normalisation, generators of its own (one has children), state that it saves itself
    and an optimizer of one of several kinds, that can be killed in its step."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.clock = seed, Decimal(0)
        self.rng, self.nested = np.random.default_rng(seed), [{"torch": torch.Generator().manual_seed(seed)}]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        count_down("micro-batch")
        x, y = batch
        if self.training:
            self.clock += Decimal("0.01")
            x = x + 0.1 * self.rng.normal() + float(self.clock * Decimal(self.rng.spawn(1)[0].random()))
            x = x + 0.1 * torch.randn(8, generator=self.nested[0]["torch"])
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def get_extra_state(self) -> Any:
        return {"clock": str(self.clock)}

    def set_extra_state(self, state: Any) -> None:
        self.clock = Decimal(state["clock"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.seed, self.parameters())


class Notes(forge.Plugin):
    """Log a text every few updates, for texts.jsonl."""

    observer = True

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if trainer.progress.update % 4 == 0:
            trainer.publish({"note": forge.Text(f"update {trainer.progress.update}, größer als zuvor")})


class Countdown:
    """Calls left until a kill; on a class, as a global of the task's module is part of the trace."""

    calls: ClassVar[dict[str, int]] = {}


def count_down(kind: str) -> None:
    """Count down and kill this process at 0, but not data workers, which inherit the counters."""
    if kind in Countdown.calls and os.getpid() == Countdown.calls["owner"]:
        Countdown.calls[kind] -= 1
        if Countdown.calls[kind] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def count_system_calls() -> None:
    """Count down before and after every system call that writes a checkpoint."""
    for name in ("open", "write", "fsync", "rename", "replace", "mkdir", "close", "symlink", "unlink", "rmdir"):
        real = getattr(os, name)

        def call(*args: Any, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            count_down("write")
            result = _real(*args, **kwargs)
            count_down("write")
            return result

        setattr(os, name, call)


def record_publications(folder: Path, once_flushed: bool) -> None:
    """Record every checkpoint once it has its name: it may disappear only after a newer one.

    Where calls can fail, a name counts once it is flushed: it is taken back if that fails.
    """
    rename, fsync, waiting = os.rename, os.fsync, []

    def publish(source: Any, target: Any, **kwargs: Any) -> None:
        rename(source, target, **kwargs)
        if re.fullmatch(r"update-\d+", Path(target).name):
            waiting.append(Path(target))
            if not once_flushed:
                note()

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        if waiting and os.path.samestat(os.fstat(descriptor), waiting[0].parent.stat()):
            note()

    def note() -> None:
        with (folder / "published").open("a") as file:
            file.writelines(f"{path.name}\n" for path in waiting)
        waiting.clear()

    os.rename, os.fsync = publish, flush


@dataclass(frozen=True, slots=True)
class Attempt:
    """The settings of one attempt of a run, and how it is killed."""

    workers: str
    death: str | None = None
    after: float = 0.0
    "Calls until the kill (for an instant: seconds)."
    signal: int | None = None
    fault: preload.Fault | None = None
    records: bool = False
    "Whether its changes of the run folder are recorded."
    background: bool = True
    on_failure: Literal["stop", "warn"] = "stop"
    "Options of the checkpoint plugin."


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that the bits of a run depend on."""

    seed: int
    precision: str

    @property
    def plugins(self) -> list[forge.Plugin]:
        """The plugins for the precision."""
        if self.precision == "float32":
            return []
        return [forge_plugins.AMP(self.precision, init_scale=2.0**20, growth_interval=3)]


def drawn(number: int, dice: random.Random) -> Run:
    """Draw the run of a case."""
    return Run(dice.randrange(SEEDS), PRECISIONS[number % len(PRECISIONS)])


def train_attempt(attempt: Attempt, folder: Path, run: Run) -> None:
    """Train from the newest checkpoint, in a forked child."""
    if attempt.death == "write":
        count_system_calls()
    if attempt.death in ("micro-batch", "write"):
        Countdown.calls.update({attempt.death: int(attempt.after), "owner": os.getpid()})
    count = 0 if attempt.workers == "0 workers" else 2
    options: dict[str, Any] = {"persistent_workers": attempt.workers == "2 persistent"} if count else {}
    train = Loader(Samples(), 4, shuffle=True, num_workers=count, **options)
    trainer = forge.Trainer(
        max_updates=UPDATES,
        seed=run.seed,
        device="cpu",
        log_every=3,
        validate_every="5 updates",
        run_dir=folder / "run",
        resume="auto",
        plugins=[
            *run.plugins,
            forge_plugins.Accumulate(4),
            forge_plugins.Clip(0.5),
            forge_plugins.Schedule("cosine", warmup=3),
            forge_plugins.Guard(),
            forge_plugins.Checkpoint(
                every="2 updates",
                keep=2,
                best={"monitor": "val/loss", "mode": "min"},
                background=attempt.background,
                on_failure=attempt.on_failure,
            ),
            forge_plugins.JSONL(),
            Notes(),
            traced(folder),
        ],
    )
    trainer.fit(Victim(run.seed), train, Loader(Samples(20), 8))


def spawn(attempt: Attempt, folder: Path, run: Run) -> int:
    """Run an attempt in a child process, kill it as planned, and return its exit code; HANG if it does not end."""
    log = folder / "stderr.log"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            for number in SIGNALS:  # a background process may inherit ignored signals
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            with log.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 2)
            record_publications(folder, once_flushed=attempt.fault is not None)
            if attempt.records:
                preload.record(folder.resolve(), folder / "changes.log")
            if attempt.fault is not None:
                attempt.fault.arm(folder / "run", folder / "failed")
            train_attempt(attempt, folder, run)
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    if attempt.death == "instant" or attempt.signal is not None:
        time.sleep(max(0.0, attempt.after - (time.monotonic() - started)))
        os.kill(child, attempt.signal or signal.SIGKILL)
    return exit_code(child, started + PATIENCE)


def exit_code(child: int, deadline: float) -> int:
    """Wait for a process; kill its session and return HANG at the deadline."""
    descriptor = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(descriptor)
    if not ended:
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if ended else HANG
