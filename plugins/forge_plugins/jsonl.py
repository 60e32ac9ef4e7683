"""Metrics as JSON lines."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import forge
from forge.util.files import make_folder, regular_only
from forge_plugins.common.sinks import as_json, counters_after, drop_after

logger = logging.getLogger("forge")

METRICS, TEXTS = "metrics.jsonl", "texts.jsonl"


class JSONL(forge.Plugin):
    """Write metrics to RUN/metrics.jsonl, one JSON object per line for every log.

    When to use it: always; it is part of the recipe `default`. Reports and `forge runs` read this file.

    What you see: each line starts with the position of the run after that update: `update`, `epoch` (epochs finished),
    `sample` (samples trained on) and `time` (seconds since this process started the run). Then come the metrics by
    name; images and histograms are not included. NaN and infinity are written as null, because JSON has no number for
    them. Texts (`forge.Text`) go to RUN/texts.jsonl, with `name` and `text`. To read the metrics:
    `pandas.read_json("metrics.jsonl", lines=True)`.

    Lines are flushed as they are written, so a killed run keeps them. A resumed run continues the file; lines after the
    checkpoint are removed, because these updates are made again. Lines that cannot be read (a bad byte, say) are moved
    to RUN/metrics.jsonl.damaged, with a warning. Without a run folder nothing is written. If the file cannot be written
    (a full disk), an error is logged once and the run continues.

    ::

        forge fit quickstart -p jsonl
    """

    observer = True
    example = {}

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one run."""
        self._file: TextIOWrapper | None = None
        self._started: float | None = None
        self._restores = 0
        self._gave_up = False

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._forget()
        self._started = time.monotonic()

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        if trainer.run_dir is None or not trainer.env.is_main or self._gave_up:
            return
        scalars = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        texts = {name: value.text for name, value in metrics.items() if isinstance(value, forge.Text)}
        epoch, sample = counters_after(trainer, update)
        where = {"update": update, "epoch": epoch, "sample": sample, "time": round(self._seconds, 3)}
        if not scalars and not texts:
            return
        try:
            file = self._ready(trainer, trainer.run_dir)
            if scalars:
                file.write(as_json({**where, **scalars, **where}) + "\n")
            if texts:
                write_texts(trainer.run_dir / TEXTS, where, texts)
        except OSError as error:
            self._give_up(error)

    @property
    def _seconds(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started

    def _ready(self, trainer: forge.Run, folder: Path) -> TextIOWrapper:
        if self._restores != trainer.restores:
            self._close()
        if self._file is None:
            self._file = self._open(trainer, folder)
        return self._file

    def _open(self, trainer: forge.Run, folder: Path) -> TextIOWrapper:
        """Open the file, without the lines of an abandoned attempt."""
        make_folder(folder)
        for name in (METRICS, TEXTS) if trainer.resumed_from is not None else ():
            drop_after(folder / name, trainer.resumed_from or 0, self.name)
        self._restores = trainer.restores
        return open(folder / METRICS, "a", buffering=1, encoding="utf-8", opener=regular_only)

    @forge.hookimpl
    def forge_end(self) -> None:
        try:
            self._close()
        except OSError as error:
            self._give_up(error)
        self._started = None

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _give_up(self, error: OSError) -> None:
        """Log the error once: metrics are not worth a run."""
        self._gave_up = True
        with suppress(OSError):  # closing flushes, which fails again
            self._close()
        logger.error(
            "jsonl: metrics.jsonl cannot be written: %s. The run continues without further lines in it.", error
        )


def write_texts(path: Path, where: dict[str, Any], texts: dict[str, str]) -> None:
    """Append texts; they are few, so the file is opened each time."""
    with open(path, "a", encoding="utf-8", opener=regular_only) as file:
        file.writelines(as_json({**where, "name": name, "text": text}) + "\n" for name, text in texts.items())
