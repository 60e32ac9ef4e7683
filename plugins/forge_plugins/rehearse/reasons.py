"""Why a run is not rehearsed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import forge
from forge.env import pick_device
from forge.util.apart import can_fork

ENDED, SHORT = "the run ended first", "the run is short"
"""Reasons that only the card gives."""
NOTABLE = 0.02
"""The part of a run's expected time that starting a second process may take."""


def why_not(trainer: forge.Run, asked: bool) -> str | None:
    """Return why a fit that begins is not rehearsed, if so; before anything is built."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return "it runs on several ranks"
    if pick_device(trainer.device).type != "cpu" and not (asked and trainer.again):
        return "a second process would need a second context on the device"
    if trainer.again is None and not can_fork():
        return "a process cannot be copied on this system"
    return None


class FitStart:
    """When a fit began, and what it took to get there."""

    def __init__(self) -> None:
        self.began, self.start_up = time.monotonic(), time.process_time()

    def is_short(self, trainer: forge.Run) -> bool:
        """Whether to start once more would take a notable part of the whole run."""
        if trainer.planned_updates is None:
            return False
        expected = (time.monotonic() - self.began) * trainer.planned_updates / max(1, trainer.progress.update)
        return self.start_up > NOTABLE * expected


def why_not_now(trainer: forge.Run, start: FitStart, asked: bool) -> str | None:
    """Return why a run is not rehearsed from its first checkpoint on, if so."""
    if trainer.env.world > 1:
        return "it runs on several ranks"
    if trainer.again and not asked and start.is_short(trainer):
        return SHORT
    with suppress(OSError, ValueError, KeyError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        if pages * os.sysconf("SC_PAGESIZE") > int(known["MemAvailable"].split()[0]) * 1024:
            return "there is no memory for a second process"
    return None
