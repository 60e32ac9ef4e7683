"""Beside: the doctor examines a copy of this process while the run goes on, and the run tells what it finds.

The copy is made when the fit begins, shares nothing with the run, and gives way to it: see `forge.util.apart`.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge.snapshot.left_out import is_left_out
from forge.util.apart import can_fork, fork_apart
from forge_doctor.deadline import Deadline
from forge_doctor.findings import Finding
from forge_doctor.report import DoctorReport

if TYPE_CHECKING:
    from forge.contract.run import Run

SECONDS = 120.0
"""That an examination beside a run may take."""
DELAY = 0.3
"""Seconds after which it begins: a shorter run is over by then."""
PATIENCE = 2.0
"""Seconds that the end of a run waits for it, and never longer than the run took."""
LARGEST = 20_000_000
"""Numbers in the weights of a task that is examined beside its run: copies of it are made."""
SWITCH = "FORGE_REHEARSE"
"""The environment variable that switches second processes off (off): for programs that make many short runs."""


def why_not(trainer: Run) -> str:
    """Return why a fit that begins is not examined beside it; "" if it is."""
    if os.environ.get(SWITCH) == "off":
        return f"{SWITCH} is off"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return "it runs on several ranks"
    if not can_fork():
        return "a process cannot be copied on this system"
    if torch.cuda.is_initialized():
        return "a process that uses a GPU cannot be copied"
    if sum(p.numel() for p in trainer.task.parameters() if not torch.nn.parameter.is_lazy(p)) > LARGEST:
        return "the task is large"
    return "" if trainer.task.check_first_batch else "check_first_batch is False"


def patience(seconds: float) -> float:
    """Return how long the end of a run that took so many seconds waits."""
    return min(PATIENCE, seconds)


class Beside:
    """An examination in a copy of this process. `told` is called with each finding, in a thread."""

    def __init__(self, trainer: Run, told: Callable[[Finding], None]):
        self.findings: list[Finding] = []
        self._began = time.monotonic()
        here, there = os.pipe()
        self.process = fork_apart((there,))
        if self.process == 0:
            try:
                _examine(trainer, there)
            finally:
                os._exit(0)  # a copy must never return to the user's program
        os.close(there)
        self._thread = threading.Thread(target=self._listen, args=(here, told), name="forge-doctor", daemon=True)
        self._thread.start()

    def _listen(self, pipe: int, told: Callable[[Finding], None]) -> None:
        with open(pipe, "rb") as messages, suppress(EOFError, pickle.UnpicklingError):
            while True:
                self.findings.append(pickle.load(messages))
                told(self.findings[-1])

    def end(self) -> None:
        """Hear what the copy has to say, and end it."""
        self._thread.join(patience(time.monotonic() - self._began))
        with suppress(ProcessLookupError):
            os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        self._thread.join()


def _examine(trainer: Run, pipe: int) -> None:
    from forge_doctor.doctor import doctor

    logging.disable()
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # on a core that nobody else wants
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, the run is not what goes
    time.sleep(DELAY)
    told: set[tuple[str, str]] = set()
    report = DoctorReport()

    def tell(_: str) -> None:
        for finding in report.findings:
            if (finding.name, finding.where) not in told and finding.name not in trainer.task.expected:
                told.add((finding.name, finding.where))
                os.write(pipe, pickle.dumps(finding))

    given = [plugin for plugin in trainer.stack if not plugin.observer and not is_left_out(plugin)]
    plan: dict[str, Any] = {"max_epochs": trainer.max_epochs, "max_updates": trainer.max_updates, "device": "cpu"}
    loaders = trainer.given_loaders
    doctor(
        trainer.task,
        loaders.get("train"),
        loaders.get("val"),
        plugins=given,
        deadline=Deadline(SECONDS),
        report=report,
        tell=tell,
        **{name: value for name, value in plan.items() if value is not None},
    )
    tell("")
