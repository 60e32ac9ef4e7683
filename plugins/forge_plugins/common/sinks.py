"""What sinks share: lines of JSON that a resumed run continues, positions of logs, failures that do not end a run."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forge
from forge.errors import StackError
from forge.runs.wording import counted
from forge.util.files import atomic_write, regular_only

logger = logging.getLogger("forge")

LONGEST = 64 * 2**20
"""Bytes of the longest line that is read at once; the rest of a longer one is damaged."""
PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
"""The user and the password of an address."""


def writes(trainer: forge.Run) -> bool:
    """Whether this process writes logs: the main one, and only with a run folder."""
    return trainer.run_dir is not None and trainer.env.is_main


def scalars_of(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log."""
    return {name: value for name, value in metrics.items() if isinstance(value, (int, float))}


def without_passwords(text: object) -> str:
    """Return a text in which the users and passwords of addresses are hidden."""
    return PASSWORD.sub("***", str(text))


def refuse_missing(package: str, plugin: str) -> None:
    """Raise StackError, with the line to install it, where a package cannot be imported."""
    try:
        __import__(package)
    except ModuleNotFoundError as error:
        raise StackError(
            f"{plugin} needs {without_passwords(error.name)}: pip install 'forge-trainer[{plugin}]'"
        ) from error


class Failures:
    """Failures of a sink: the first is logged, and the sink is used no more; logs are not worth a run."""

    def __init__(self, name: str):
        self.name, self.given_up = name, False

    @contextmanager
    def noted(self) -> Generator[None]:
        """Give up on an exception in the block."""
        try:
            yield
        except Exception as error:
            self.given_up = True
            what = f"{type(error).__name__}: {without_passwords(error)}"
            logger.error("%s: nothing more is logged there: %s. The run continues without it.", self.name, what)


def drop_after(path: Path, update: int, by: str = "jsonl") -> None:
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


def counters_after(trainer: forge.Run, update: int) -> tuple[int, int]:
    """Return (epochs, samples) done after `update`. A log can arrive one update late, within the step or after it."""
    progress, step = trainer.progress, trainer.step
    if step is None:
        return progress.epoch, progress.sample
    if update <= step.index:
        return step.epoch, progress.sample - (step.samples if progress.update > step.index else 0)
    return step.epoch + step.ends_epoch, progress.sample


def as_json(record: dict[str, Any]) -> str:
    """Return one line of valid JSON, with null for NaN and infinity."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        return json.dumps(finite, allow_nan=False)
