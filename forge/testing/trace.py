"""Trace: the evidence of every update of a run in a file, to compare two runs (`forge.snapshot.evidence.compare`)."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.step import Step
from forge.engine.trainer import Trainer
from forge.snapshot.evidence import Line, line_of


class Recorder(Plugin):
    """Write one line per update with digests of everything that a resumed run must repeat."""

    observer = True

    def __init__(self, path: str | Path, kill_at: int | None = None):
        super().__init__()
        self.name = "forge.testing.recorder"
        self.path, self.kill_at = Path(path), kill_at

    @hookimpl
    def forge_boundary(self, trainer: Trainer, step: Step) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line_of(trainer, step)) + "\n")
        if self.kill_at is not None and trainer.progress.update >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def read_trace(path: Path) -> list[Line]:
    """Read the lines of a trace; a line cut short by a kill is skipped."""
    lines: list[Line] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines
