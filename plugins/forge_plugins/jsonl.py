"""Metrics as JSON lines."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import forge

logger = logging.getLogger("forge")


class JSONL(forge.Plugin):
    """Write metrics to RUN/metrics.jsonl, one JSON object a line for every log.

    Each line begins with where the run was: `update`, `epoch` (epochs finished) and `sample` (samples trained on), as
    they stood after that update, and `time` (seconds since this process started the run). Then come the metrics, by
    name; images, texts and histograms are left out. What is not finite (NaN, infinity) is written as null, because
    JSON has no number for it and a column keeps its type.

    Lines are flushed as they are written, so a killed run keeps them. A file that is there already is continued; what
    it holds of updates after the checkpoint that a run was resumed from is dropped, because they are made again.
    Without a run folder nothing is written. Where the file cannot be written (a full disk), that is logged as an error,
    once, and the run goes on without it. To read it: `pandas.read_json("metrics.jsonl", lines=True)`.

    ::

        forge fit quickstart -p jsonl
    """

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self._file: TextIOWrapper | None = None
        self._started = 0.0
        self._restores = 0
        self._gave_up = False

    @forge.hookimpl
    def forge_start(self) -> None:
        self._started = time.monotonic()
        self._restores = 0
        self._gave_up = False

    @forge.hookimpl
    def forge_log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
        if trainer.run_dir is None or not trainer.env.is_main or self._gave_up:
            return
        scalars = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if not scalars:
            return
        epoch, sample = counters_after(trainer, update)
        where = {"update": update, "epoch": epoch, "sample": sample, "time": round(time.monotonic() - self._started, 3)}
        try:
            self._write(trainer, trainer.run_dir / "metrics.jsonl", as_json({**where, **scalars, **where}) + "\n")
        except OSError as error:
            self._give_up(error)

    def _write(self, trainer: forge.Trainer, path: Path, line: str) -> None:
        if self._restores != trainer.restores:
            self._close()
        if self._file is None:
            self._file = self._open(trainer, path)
        self._file.write(line)

    def _open(self, trainer: forge.Trainer, path: Path) -> TextIOWrapper:
        path.parent.mkdir(parents=True, exist_ok=True)
        if trainer.resumed_from is not None and path.exists():
            drop_after(path, trainer.resumed_from)
        self._restores = trainer.restores
        return path.open("a", buffering=1, encoding="utf-8")

    @forge.hookimpl
    def forge_end(self) -> None:
        try:
            self._close()
        except OSError as error:
            self._give_up(error)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _give_up(self, error: OSError) -> None:
        """Metrics are not worth a run."""
        self._gave_up = True
        with suppress(OSError):  # what it could not write before it cannot write now
            self._close()
        logger.error("jsonl: metrics.jsonl cannot be written: %s. The run goes on, without further lines in it.", error)


def drop_after(path: Path, update: int) -> None:
    """Take the lines of later updates out of a metrics file, and a last line that a kill has cut short."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["update"] <= update:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(beside, path)


def counters_after(trainer: forge.Trainer, update: int) -> tuple[int, int]:
    """(epochs, samples) done after `update`; a log can arrive one update late, and within the step or after it."""
    progress, step = trainer.progress, trainer.step
    if step is None:
        return progress.epoch, progress.sample
    if update <= step.index:
        return step.epoch, progress.sample - (step.samples if progress.update > step.index else 0)
    return step.epoch + step.ends_epoch, progress.sample


def as_json(record: dict[str, Any]) -> str:
    """One line of valid JSON, whatever the numbers are."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        return json.dumps(finite, allow_nan=False)
