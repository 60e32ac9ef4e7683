"""A run for tests of loggers: it is killed at update 37, and resumes from the checkpoint of update 30."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge_plugins import Checkpoint
from tests.support import forked
from tests.support.tasks import Classifier, make_batches

KILLED, SAVED, LAST = 37, 30, 40


class Draws(Classifier):
    """Logs pictures, texts and a histogram after each validation."""

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        return {
            "picture": forge.Image(torch.full((3, 4, 5), 0.5), "half"),
            "note": forge.Text("**bold**"),
            "weights": forge.Histogram.of(torch.arange(10.0), bins=4),
        }


def kill(trainer: forge.Run) -> None:
    if trainer.progress.update == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def fail(trainer: forge.Run) -> None:
    if trainer.progress.update == KILLED:
        raise RuntimeError("on purpose")


def live(logger: Any, folder: Path, end: Any = None, resume: Any = None, updates: int = LAST) -> forge.FitResult:
    """Fit 40 updates, log every update, validate every ten, save every fifteen."""
    plugins = [logger(), Checkpoint("15 updates")]
    if end is not None:
        plugins.append(forge.on("boundary")(end))
    trainer = forge.Trainer(
        max_updates=updates,
        log_every=1,
        validate_every="10 updates",
        plugins=plugins,
        run_dir=folder,
        resume=resume,
        seed=0,
        device="cpu",
    )
    return trainer.fit(Draws(), make_batches(8), make_batches(1))


def live_twice(logger: Any, folder: Path, killed: bool = True) -> None:
    """Have a run killed in a process of its own, or fail here, then resume it."""
    if killed:
        gone = forked.call(partial(live, logger, folder, end=kill))
        assert gone.returncode == -signal.SIGKILL, gone.stderr
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            live(logger, folder, end=fail)
    live(logger, folder, resume=True)


def bytes_below(folder: Path) -> bytes:
    """All that is written below a folder, names included."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return b"\n".join(str(path).encode() + b"\n" + path.read_bytes() for path in files)
