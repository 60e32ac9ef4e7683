"""Loggers: what all of them share. A `Sink` says how it opens, logs and closes; a resume continues files of lines."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from forge.checkpoint import wait_until_written
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.errors import StackError
from forge.runs.wording import counted
from forge.util.files import atomic_write, make_folder, regular_only

logger = logging.getLogger("forge")

LONGEST = 64 * 2**20
"""Bytes of the longest line that is read at once; the rest of a longer one is damaged."""
PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
"""The user and the password of an address."""

Value = TypeVar("Value")


class Sink(Plugin):
    """A logger of the main process of a run with a folder: opened by its first log, and again after a rewind.

    The first failure is logged, and the logger is used no more: logs are not worth a run.
    """

    observer = True
    effects = ("files",)
    package: str | None = None
    "What must be installed; the extra of forge has the same name."
    survives: type[Exception] = OSError
    "Failures that end the logger and not the run."

    def __init__(self, *first: Any, **values: Any):
        super().__init__(*first, **values)
        self.begin()

    def begin(self) -> None:
        """Reset the state of one run."""
        self.folder = Path()
        "The run folder, once something is logged."
        self.opened: Any = None
        "What `open` returned."
        self.error: BaseException | None = None
        "What ended the run."
        self.given_up, self._restores, self._started = False, 0, time.monotonic()

    # -- what a logger says -------------------------------------------------------------------------------------------

    def open(self, trainer: Run) -> Any:
        """Return a writer. After a rewind or a resume it goes on at `trainer.resumed_from`."""
        raise NotImplementedError

    def reopen(self, trainer: Run) -> Any:
        """Return the writer to use after a rewind."""
        self.close(trainer)
        return self.open(trainer)

    def log(self, trainer: Run, update: int, metrics: dict[str, Any]) -> None:
        """Log metrics to `self.ready(trainer)`."""
        raise NotImplementedError

    def close(self, trainer: Run) -> None:
        self.opened.close()

    # -- a run --------------------------------------------------------------------------------------------------------

    @hookimpl
    def forge_configure(self) -> None:
        if self.package is not None:
            try:
                __import__(self.package)
            except ModuleNotFoundError as error:
                missing = without_passwords(error.name)
                raise StackError(f"{self.name} needs {missing}: pip install 'forge-trainer[{self.package}]'") from error

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        self.begin()

    @hookimpl
    def forge_log(self, trainer: Run, update: int, metrics: dict[str, Any]) -> None:
        if trainer.run_dir is not None and trainer.env.is_main and not self.given_up:
            self.folder = trainer.run_dir
            with self.surviving():
                self.log(trainer, update, metrics)

    @hookimpl
    def forge_exception(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def forge_end(self, trainer: Run) -> None:
        try:
            if self.opened is not None:
                with self.surviving():
                    self.close(trainer)
        finally:
            self.opened = None

    def ready(self, trainer: Run) -> Any:
        """Return the writer, without what was logged after the update that the run was restored to."""
        if self.opened is None or self._restores != trainer.restores:
            self._restores = trainer.restores
            self.opened = self.open(trainer) if self.opened is None else self.reopen(trainer)
        return self.opened

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Give up on a failure in the block."""
        try:
            yield
        except self.survives as error:
            if not self.given_up:
                what = f"{type(error).__name__}: {without_passwords(error)}"
                logger.error("%s: nothing more is logged there: %s. The run continues without it.", self.name, what)
            self.given_up = True

    def position(self, trainer: Run, update: int) -> dict[str, Any]:
        """Return where the run was after `update`, and the seconds since this process started it."""
        epoch, sample = counters_after(trainer, update)
        return {"update": update, "epoch": epoch, "sample": sample, "time": round(time.monotonic() - self._started, 3)}


def writes(trainer: Run) -> bool:
    """Whether this process writes logs: the main one, and only with a run folder."""
    return trainer.run_dir is not None and trainer.env.is_main


def of_kind(metrics: dict[str, Any], kind: type[Value]) -> dict[str, Value]:
    """Return the images, texts, histograms or embeddings of a log."""
    return {name: value for name, value in metrics.items() if isinstance(value, kind)}


def scalars_of(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log."""
    return {name: value for name, value in metrics.items() if isinstance(value, (int, float))}


def without_passwords(text: object) -> str:
    """Return a text in which the users and passwords of addresses are hidden."""
    return PASSWORD.sub("***", str(text))


def last_kept(trainer: Run) -> int | None:
    """Return the last update whose logs stand: of a resumed fit its checkpoint's; None: all logs stand."""
    return trainer.resumed_from if trainer.verb == "fit" else None


def counters_after(trainer: Run, update: int) -> tuple[int, int]:
    """Return (epochs, samples) done after `update`. A log can arrive one update late, within the step or after it."""
    progress, step = trainer.progress, trainer.step
    if step is None:
        return progress.epoch, progress.sample
    if update <= step.index:
        return step.epoch, progress.sample - (step.samples if progress.update > step.index else 0)
    return step.epoch + step.ends_epoch, progress.sample


# ---------------------------------------------------------------------------------------------------------------------
# Loggers of a service: its id of the run, the checkpoints


def run_id(trainer: Run, path: Path, key: str, make: Callable[[], str]) -> str:
    """Return a service's id of this run, from a file of the run folder; a new run gets one, which is written there."""
    if path.exists() and not (trainer.verb == "fit" and trainer.resumed_from is None):
        return json.loads(path.read_text(encoding="utf-8"))[key]
    made = make()
    make_folder(path.parent)
    with atomic_write(path) as beside:
        beside.write_text(json.dumps({key: made}) + "\n", encoding="utf-8")
    return made


def checkpoints(folder: Path) -> dict[str, Path]:
    """Return the best and the latest checkpoint of a run, as far as there are any, once all are on disk."""
    wait_until_written()
    aliases = {alias: folder / "checkpoints" / alias for alias in ("best", "latest")}
    return {alias: path.resolve() for alias, path in aliases.items() if path.is_dir()}


# ---------------------------------------------------------------------------------------------------------------------
# Files of lines


def appending(path: Path) -> TextIO:
    """Open a file to which whole lines are added, each on disk as soon as it is written."""
    return open(path, "a", buffering=1, encoding="utf-8", newline="", opener=regular_only)


def drop_after(path: Path, update: int, by: str) -> None:
    """Remove the lines of later updates from a file, and a last line that a kill has cut short.

    Other lines that cannot be read are moved to a file beside it, with one warning.
    """
    if not os.path.lexists(path):
        return
    aside, damaged = path.with_name(f"{path.name}.damaged"), 0
    with open(path, "rb", opener=regular_only) as file, atomic_write(path) as beside, beside.open("wb") as kept:
        for line in iter(lambda: file.readline(LONGEST), b""):
            made = update_of(line)
            if made is not None and made <= update:
                kept.write(line if line.endswith(b"\n") else line + b"\n")
            elif made is None and (line.endswith(b"\n") or len(line) == LONGEST):
                damaged += 1
                with open(aside, "ab", opener=regular_only) as rest:
                    rest.write(line)
    if damaged:
        what = counted(damaged, "damaged line")
        logger.warning("%s: %s of %s moved to %s; the others stay.", by, what, path, aside.name)


def update_of(line: bytes) -> int | None:
    """Return the update of a line; None if the line is damaged."""
    try:
        found = json.loads(line.decode("utf-8"))["update"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if type(found) is int else None


def as_json(record: dict[str, Any]) -> str:
    """Return one line of valid JSON, with null for NaN and infinity."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        return json.dumps(finite, allow_nan=False)
