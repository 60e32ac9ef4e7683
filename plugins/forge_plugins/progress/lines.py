"""Progress as plain lines, without a terminal."""

from __future__ import annotations

import time

import forge
from forge_plugins.progress.reading import clock, epoch_of, listed, rates_of, speed_of, updates_of
from forge_plugins.progress.screen import Screen
from forge_plugins.progress.status import Status


class Lines:
    """One plain line per interval, epoch and validation."""

    def __init__(self, status: Status, every: forge.Interval):
        self.status, self.every = status, every
        self._seconds = every.count if every.unit == "second" else 0.0
        self._next = time.monotonic() + self._seconds
        self._owed = False
        self._screen = Screen()
        if status.opening:
            self._write(status.opening)

    def look(self, step: forge.Step) -> float:
        status = self.status
        if step.ends_epoch and status.logged < status.update:
            self._owed = True  # on an accelerator the epoch's last metrics arrive with the next update
            return 0.0
        ended = time.monotonic() >= self._next if self._seconds else self.every.due(step)
        if step.ends_epoch or self._owed or status.validated or ended:
            parts = [epoch_of(status), f"update {updates_of(status)}", rates_of(status, wide=True)]
            parts.append(f"{clock(status.remaining)} left" if status.remaining is not None else "")
            self._write("  ".join(filter(None, parts)) + listed(status.shown))
            self._owed = status.validated = False
            self._next = time.monotonic() + self._seconds
        return self._next if self._seconds else 0.0

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        status = self.status
        if status.verb != "fit":
            self._write(f"{status.verb} {status.ending} in {clock(status.elapsed)}{listed(status.shown)}")
            return
        parts = [status.ending, epoch_of(status), f"update {updates_of(status)}", f"in {clock(status.elapsed)}"]
        parts.append(speed_of(status.average_speed, wide=True))
        self._write("  ".join(filter(None, parts)) + listed(status.shown))

    def _write(self, text: str) -> None:
        print(text, file=self._screen, flush=True)
