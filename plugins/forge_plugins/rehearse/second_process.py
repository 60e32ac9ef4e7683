"""The second process: a copy of this one as it was when the fit began, which continues the run when it is told to."""

from __future__ import annotations

import logging
import os
import shutil
from multiprocessing.connection import Connection
from typing import Any

import torch

import forge
from forge.env import pick_device
from forge.snapshot.evidence import mark_update
from forge.twin.record import Record
from forge.util.apart import Copy, can_fork

FOLDER = ".rehearsal"
"""The folder, in the run's, in which second processes work."""


def noted(record: Record, trainer: forge.Run, step: forge.Step, updates: range) -> bool:
    """Mark all that a run has after an update, if it is one of these; return whether it was the last."""
    if trainer.progress.update in updates:
        mark_update(record, trainer, step)
    return trainer.progress.update >= updates[-1]


def why_none(trainer: forge.Run) -> str:
    """Return why a fit that begins has no second process; "" if it has."""
    if pick_device(trainer.device).type != "cpu":
        return "a second process would need a second context on the device"
    return "" if can_fork() else "a process cannot be copied on this system"


def second_processes(trainer: Any) -> list[Copy]:
    """Return two copies of this process, of which each can continue the run once.

    One that is sent the path of a checkpoint, and the updates to note after it, continues from it, says {"marks": what
    it then has}, {"refused": why it cannot resume} or {"failed": what went wrong}, and ends.
    """
    task, loaders, record = trainer.task, trainer.given_loaders, Record()
    acting = [plugin for plugin in trainer.given_plugins if not _only_looks_or_saves(plugin)]

    def play(run: Connection) -> None:
        logging.disable()
        checkpoint, updates = run.recv()
        folder = checkpoint.parent / str(os.getpid())

        def say(kind: str, what: Any) -> None:
            run.send({kind: what})
            os._exit(0)

        @forge.on("boundary")
        def note(trainer: forge.Run, step: forge.Step) -> None:
            if noted(record, trainer, step, updates):
                say("marks", record.marks)

        try:
            shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name, copy_function=os.link)
            trainer.stack.reset([*acting, note])
            trainer.reset()
            trainer.resume, trainer.wanted_run_dir = "auto", folder
            trainer.fit(task, loaders["train"], loaders["val"])
        except Exception as error:
            if trainer.step is None:  # before its first update
                say("refused", str(error))
            say("failed", f"{type(error).__name__}: {error}".splitlines()[0][:400])
        say("failed", "it made too few updates")

    torch.optim.SGD([torch.zeros(())], lr=0.0)  # imports half of torch: once, before the copies are made
    torch.zeros((), requires_grad=True).backward()  # after a compiler's work this starts threads: no copy then
    return [Copy(play), Copy(play)]


def _only_looks_or_saves(plugin: forge.Plugin) -> bool:
    looks = plugin.observer and getattr(plugin, "forge_build_loader", None) is None
    return looks or getattr(plugin, "forge_save", None) is not None
