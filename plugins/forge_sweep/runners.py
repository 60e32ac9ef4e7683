"""Run one trial: in a process of its own, or in this one. What it gave is in its run folder."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from forge.config import Recipe
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.engine.trainer import Trainer
from forge.errors import Interrupted
from forge.util.children import OUTPUT, Children, cause_of_death
from forge.util.files import make_folder

CHANNEL = "FORGE_SWEEP_CHANNEL"
"""The environment variable with the descriptor on which a trial talks to its sweep."""
MODULE = "forge_sweep.commands.sweep_trial"

Report = Callable[[int, float], str]
"""Takes an update and the metric's value; returns why the trial is to stop, else an empty text."""


class TrialRunner(Protocol):
    """Runs a trial in its folder with these overrides; a trial that is there already is resumed.

    Returns why it failed, else an empty text. Raises Interrupted if a signal ended it, so that it is to be resumed.
    """

    def __call__(self, folder: Path, overrides: Sequence[str], report: Report, device: str | None) -> str: ...

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


def train(trainer: Trainer, task: Any, data: Any, metric: str, report: Report) -> None:
    """Fit a trial in this process, or go on with it."""
    trainer.resume = "auto"
    trainer.stack.add(TrialReporter(metric, report))
    trainer.fit(task, data.train, data.val)


class InProcess:
    """Runs trials in this process, one at a time; a trial that raises has failed."""

    def __init__(self, load: Callable[[Sequence[str]], Recipe], metric: str):
        self._load, self._metric = load, metric

    def __call__(self, folder: Path, overrides: Sequence[str], report: Report, device: str | None) -> str:
        try:
            recipe = self._load(overrides)
            trainer, task = Trainer(recipe=recipe, run_dir=folder), recipe.make_task()
            train(trainer, task, recipe.make_data(task), self._metric, report)
        except Exception as error:
            make_folder(folder)
            with (folder / OUTPUT).open("a", encoding="utf-8") as output:
                output.writelines(traceback.format_exception(error))
            return f"{type(error).__name__}: {error}"
        return ""

    def stop(self) -> None:
        """Do nothing: the signal reaches the Trainer itself."""


class OwnProcess:
    """Runs each trial in a process of its own: `forge fit` with a channel to the sweep."""

    def __init__(self, words: Callable[[Sequence[str]], Sequence[str]], metric: str):
        self._words, self._metric = words, metric
        "`words` returns the arguments of `forge fit` with some overrides."
        self._children = Children()

    def __call__(self, folder: Path, overrides: Sequence[str], report: Report, device: str | None) -> str:
        make_folder(folder)
        words = [*self._words(overrides), "--run-dir", str(folder), "--resume"]
        here, there = Pipe()
        with here, (folder / OUTPUT).open("ab") as output:
            channel = {CHANNEL: str(there.fileno())}
            options: dict[str, Any] = {"stdout": output, "stderr": output, "pass_fds": [there.fileno()]}
            with self._children.start(["-m", MODULE], device, channel, **options) as child:
                there.close()
                try:
                    converse(TrialChannel(here), [words, self._metric], report)
                finally:
                    here.close()  # a trial that still waits for an answer ends
        if child.returncode == Interrupted.EXIT_CODE or (child.returncode and self._children.stopped):
            raise Interrupted("A trial was interrupted.")
        return cause_of_death(child.returncode, folder / OUTPUT) if child.returncode else ""

    def stop(self) -> None:
        """Ask every trial to save and end."""
        self._children.stop()


class TrialChannel:
    """Either end of the channel between a sweep and a trial in another process: JSON, message by message."""

    def __init__(self, connection: Connection):
        self._connection = connection

    @classmethod
    def of_trial(cls) -> TrialChannel:
        return cls(Connection(int(os.environ.pop(CHANNEL))))

    def say(self, what: Any) -> None:
        self._connection.send_bytes(json.dumps(what).encode())

    def hear(self) -> Any:
        return json.loads(self._connection.recv_bytes())

    def report(self, update: int, value: float) -> str:
        """Report a value from within the trial; the sweep says whether it is to stop."""
        self.say([update, value])
        return self.hear()


def converse(trial: TrialChannel, work: list[Any], report: Report) -> None:
    """Give a trial its work, and answer its reports until it ends."""
    try:
        trial.say(work)
        while True:
            trial.say(report(*trial.hear()))
    except (OSError, EOFError):
        return
