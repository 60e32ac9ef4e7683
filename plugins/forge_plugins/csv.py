"""Metrics as one table."""

from __future__ import annotations

import csv
import io
import logging
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import forge
from forge.runs.wording import counted
from forge.util.files import atomic_write, make_folder, regular_only
from forge_plugins.common.sinks import counters_after, scalars_of, writes

logger = logging.getLogger("forge")

FILE = "metrics.csv"
POSITION = ["update", "epoch", "sample", "time"]


class CSV(forge.Plugin):
    """Write metrics to RUN/metrics.csv, one row for every log and one column for every metric.

    When to use it: to open the metrics in a spreadsheet, or with `pandas.read_csv("metrics.csv")`.

    What you see: each row starts with the position of the run after that update: `update`, `epoch` (epochs finished),
    `sample` (samples trained on) and `time` (seconds since this process started the run). A metric that a log does not
    have is an empty cell. A new metric adds a column at the right, for which the file is written again. Images, texts
    and histograms are not included.

    Rows are flushed as they are written, so a killed run keeps them. A resumed run continues the file; rows after the
    checkpoint are removed, because these updates are made again. Without a run folder nothing is written. If the file
    cannot be written (a full disk), an error is logged once and the run continues.

    ::

        forge fit quickstart -p csv
    """

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one run."""
        self._file: TextIOWrapper | None = None
        self._columns: list[str] = []
        self._restores = 0
        self._gave_up = False
        self._started = time.monotonic()

    @forge.hookimpl
    def forge_start(self) -> None:
        self._forget()

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        scalars = scalars_of(metrics)
        if not scalars or not writes(trainer) or self._gave_up:
            return
        assert trainer.run_dir is not None
        epoch, sample = counters_after(trainer, update)
        position = dict(zip(POSITION, (update, epoch, sample, round(time.monotonic() - self._started, 3)), strict=True))
        try:
            file = self._ready(trainer, trainer.run_dir / FILE, [*POSITION, *scalars])
            file.write(as_row({**scalars, **position}.get(column, "") for column in self._columns))
        except OSError as error:
            self._give_up(error)

    def _ready(self, trainer: forge.Run, path: Path, columns: list[str]) -> TextIOWrapper:
        """Return the file, opened, with these columns, and without the rows of an abandoned attempt."""
        if self._restores != trainer.restores:
            self._close()
        if self._file is None:
            make_folder(path.parent)
            self._restores = trainer.restores
            last = trainer.resumed_from if trainer.verb == "fit" else None
            self._columns = self._rewrite(path, last, columns)
            self._file = self._open(path)
        elif not set(columns) <= set(self._columns):
            self._close()
            self._columns = self._rewrite(path, None, columns)
            self._file = self._open(path)
        return self._file

    def _open(self, path: Path) -> TextIOWrapper:
        return open(path, "a", buffering=1, encoding="utf-8", newline="", opener=regular_only)

    def _rewrite(self, path: Path, last: int | None, columns: list[str]) -> list[str]:
        """Write the file again with these columns added, and without rows of updates after `last`; return its columns.

        A last row that a kill has cut short is dropped. Where other rows cannot be read, a copy of the file is kept.
        """
        header, rows, damaged = read(path)
        if damaged:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.copyfile(path, aside)
            what = counted(damaged, "damaged row")
            logger.warning("csv: %s of %s dropped; %s is the file as it was.", what, path, aside.name)
        kept = [row for row in rows if last is None or int(row[0]) <= last]
        columns = [*header, *(column for column in columns if column not in header)]
        if columns != header or len(kept) != len(rows) or damaged or not ends_with_a_line(path):
            with atomic_write(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
                file.write(as_row(columns))
                for row in kept:
                    file.write(as_row([*row, *[""] * (len(columns) - len(row))]))
        return columns

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
        """Log the error once: metrics are not worth a run."""
        self._gave_up = True
        with suppress(OSError):  # closing flushes, which fails again
            self._close()
        logger.error("csv: %s cannot be written: %s. The run continues without further rows in it.", FILE, error)


def as_row(values: Iterable[Any]) -> str:
    """Return one row as text, with its end of line."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def read(path: Path) -> tuple[list[str], list[list[str]], int]:
    """Return columns and rows of a file, and the number of damaged rows among them; the last row may be cut short."""
    if not os.path.lexists(path):
        return [], [], 0
    with open(path, encoding="utf-8", errors="replace", newline="", opener=regular_only) as file:
        lines = [line for line in file if line.endswith("\n")]
    found = list(csv.reader(line.replace("\0", "\N{REPLACEMENT CHARACTER}") for line in lines))
    header, rows = (found[0], found[1:]) if found else ([], [])
    if header[: len(POSITION)] != POSITION:
        return [], [], len(found)
    good = [row for row in rows if len(row) == len(header) and row[0].isascii() and row[0].isdigit()]
    return header, good, len(rows) - len(good)


def ends_with_a_line(path: Path) -> bool:
    """Whether the last byte of a file ends a line."""
    with open(path, "rb", opener=regular_only) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
