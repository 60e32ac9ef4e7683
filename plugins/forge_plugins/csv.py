"""Metrics as one table."""

from __future__ import annotations

import csv
import io
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import forge
from forge.runs.sinks import Sink, appending, last_kept, scalars_of
from forge.runs.wording import counted
from forge.util.files import atomic_write, make_folder, regular_only

logger = logging.getLogger("forge")

FILE = "metrics.csv"
POSITION = ["update", "epoch", "sample", "time"]


class CSV(Sink):
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

    def begin(self) -> None:
        super().begin()
        self._columns: list[str] = []

    def open(self, trainer: forge.Run) -> TextIO:
        """Open the file, without the rows of an abandoned attempt."""
        make_folder(self.folder)
        self._columns = rewritten(self.folder / FILE, self._columns, last_kept(trainer))
        return appending(self.folder / FILE)

    def log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        scalars = scalars_of(metrics)
        if not scalars:
            return
        where = self.position(trainer, update)
        values = {**where, **scalars, **where}
        self._columns = self._columns or list(values)
        file = self.ready(trainer)
        if not values.keys() <= set(self._columns):
            file.close()
            self._columns = rewritten(self.folder / FILE, list(values))
            file = self.opened = appending(self.folder / FILE)
        file.write(as_row(values.get(column, "") for column in self._columns))


def rewritten(path: Path, columns: list[str], last: int | None = None) -> list[str]:
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
    if columns != header or len(kept) != len(rows) or damaged or not path.read_bytes().endswith(b"\n"):
        with atomic_write(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
            file.write(as_row(columns))
            file.writelines(as_row([*row, *[""] * (len(columns) - len(row))]) for row in kept)
    return columns


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
