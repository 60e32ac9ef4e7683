"""Metrics as JSON lines."""

from __future__ import annotations

from typing import Any, TextIO

import forge
from forge.runs.sinks import Sink, appending, as_json, drop_after, last_kept, of_kind, scalars_of
from forge.util.files import make_folder

METRICS, TEXTS = "metrics.jsonl", "texts.jsonl"


class JSONL(Sink):
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

    example = {}

    def open(self, trainer: forge.Run) -> TextIO:
        """Open the file, without the lines of an abandoned attempt."""
        make_folder(self.folder)
        last = last_kept(trainer)
        for name in (METRICS, TEXTS) if last is not None else ():
            drop_after(self.folder / name, last or 0, self.name)
        return appending(self.folder / METRICS)

    def log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        scalars, texts = scalars_of(metrics), of_kind(metrics, forge.Text)
        if not scalars and not texts:
            return
        file, where = self.ready(trainer), self.position(trainer, update)
        if scalars:
            file.write(as_json({**where, **scalars, **where}) + "\n")
        if texts:  # they are few, so their file is opened each time
            with appending(self.folder / TEXTS) as beside:
                beside.writelines(as_json({**where, "name": n, "text": t.text}) + "\n" for n, t in texts.items())
