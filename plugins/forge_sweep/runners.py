"""Run one trial: in a process of its own, or in this one."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.config import Recipe
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.engine.trainer import Trainer
from forge.errors import ForgeError, Interrupted
from forge.util.children import OUTPUT, Children, cause_of_death, die_with_parent
from forge.util.files import make_folder

CHANNEL = "FORGE_SWEEP_CHANNEL"
"""The environment variable with the descriptor on which a trial talks to its sweep."""
MODULE = "forge_sweep.commands.sweep_trial"

Report = Callable[[int, float], str]
"""Takes an update and the metric's value; returns why the trial is to stop, else an empty text."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended."""

    value: float | None = None
    "The last value of the metric."
    reason: str = ""
    "Why it failed."
    interrupted: bool = False
    "Whether a signal ended it, so that it is to be resumed."
    known: tuple[str, ...] = ()
    "The metrics that it logged, if the one in question is not among them."


class TrialRunner(Protocol):
    """Runs a trial in its folder with these overrides; a trial that is there already is resumed."""

    def __call__(self, folder: Path, overrides: Sequence[str], report: Report, device: str | None) -> TrialResult: ...

    def stop(self) -> None:
        """End what runs, after saving it; called from another thread, or a signal handler."""
        ...


class TrialReporter(Plugin):
    """Report the metric of a sweep, and stop the run where the sweep says so."""

    observer = True

    def __init__(self, metric: str, report: Report):
        super().__init__()
        self.name = "sweep"
        self._metric, self._report = metric, report

    @hookimpl
    def forge_log(self, trainer: Run, update: int, metrics: dict[str, Any]) -> None:
        value = metrics.get(self._metric)
        if trainer.verb == "fit" and trainer.env.is_main and isinstance(value, (int, float)):
            stop = self._report(update, float(value))
            if stop:
                trainer.request_stop(stop, by="sweep")


def train(build: Callable[[], tuple[Any, Any, Any]], metric: str, report: Report) -> TrialResult:
    """Fit a trial in this process. `build` returns Trainer, task and data, in the run folder of the trial."""
    trainer, task, data = build()
    trainer.resume = "auto"
    trainer.stack.add(TrialReporter(metric, report))
    found = trainer.fit(task, data.train, data.val).metrics
    value = found.get(metric)
    if isinstance(value, (int, float)):
        return TrialResult(float(value))
    numbers = (name for name, other in found.items() if isinstance(other, (int, float)))
    return TrialResult(known=tuple(sorted(numbers)))


class InProcess:
    """Runs trials in this process, one at a time; a trial that raises has failed."""

    def __init__(self, load: Callable[[Sequence[str]], Recipe], metric: str):
        self._load, self._metric = load, metric

    def __call__(self, folder: Path, overrides: Sequence[str], report: Report, device: str | None) -> TrialResult:
        def build() -> tuple[Any, Any, Any]:
            trainer = Trainer(recipe=recipe, run_dir=folder)
            task = recipe.make_task()
            return trainer, task, recipe.make_data(task)

        try:
            recipe = self._load(overrides)
            return train(build, self._metric, report)
        except Exception as error:
            make_folder(folder)
            with (folder / OUTPUT).open("a", encoding="utf-8") as output:
                output.writelines(traceback.format_exception(error))
            return TrialResult(reason=f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        """Do nothing: the signal reaches the Trainer itself."""


class OwnProcess:
    """Runs each trial in a process of its own: `forge fit` with a channel to the sweep."""

    def __init__(self, words: Callable[[Sequence[str]], Sequence[str]], metric: str):
        self._words, self._metric = words, metric
        "`words` returns the arguments of `forge fit` with some overrides."
        self._children = Children()

    def __call__(self, folder: Path, overrides: Sequence[str], report: Report, device: str | None) -> TrialResult:
        make_folder(folder)
        here, there = socket.socketpair()
        with here, (folder / OUTPUT).open("ab") as output:
            channel = {CHANNEL: str(there.fileno())}
            options: dict[str, Any] = {"stdout": output, "stderr": output, "pass_fds": [there.fileno()]}
            with self._children.start(["-m", MODULE], device, channel, **options) as child:
                there.close()
                try:
                    words = [*self._words(overrides), "--run-dir", str(folder), "--resume"]
                    result = converse(here, {"words": words, "metric": self._metric}, report)
                finally:
                    here.close()  # a trial that still waits for an answer ends
            code = child.returncode
        if code == Interrupted.EXIT_CODE or (result is None and self._children.stopped):
            return TrialResult(interrupted=True)
        return result or TrialResult(reason=cause_of_death(code, folder / OUTPUT))

    def stop(self) -> None:
        """Ask every trial to save and end."""
        self._children.stop()


def converse(channel: socket.socket, request: dict[str, Any], report: Report) -> TrialResult | None:
    """Give a trial its work, answer its reports, and return its result; None if it died."""
    try:
        channel.sendall(json.dumps(request).encode() + b"\n")
        with channel.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "update" not in message:
                    return TrialResult(message["value"], message["reason"], known=tuple(message["known"]))
                answer = report(message["update"], message["value"])
                channel.sendall(json.dumps({"stop": answer}).encode() + b"\n")
    except (OSError, ValueError):  # it died in the middle of a word
        return None
    return None


# -- in the process of a trial ----------------------------------------------------------------------------------------


class SweepChannel:
    """The trial's end of the channel."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ.pop(CHANNEL)))
        self._lines = self._socket.makefile("rb")
        request = self._read()
        self.words: list[str] = request["words"]
        self.metric: str = request["metric"]
        die_with_parent()

    def report(self, update: int, value: float) -> str:
        self._write({"update": update, "value": value})
        return self._read()["stop"]

    def finish(self, result: TrialResult) -> None:
        self._write({"value": result.value, "reason": result.reason, "known": result.known})

    def _read(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ForgeError("The sweep of this trial has ended.")
        return json.loads(line)

    def _write(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
