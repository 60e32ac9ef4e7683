"""Progress on a terminal: a bar for the epoch, a bar for the run, and the latest metrics."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

import forge
from forge.runs.summary import summary
from forge.util import past_display
from forge_plugins.progress import reading
from forge_plugins.progress.screen import Screen, is_terminal
from forge_plugins.progress.status import NEVER, Status

REFRESH = 0.25
"""Seconds between two redraws; without a thread, a slow step is drawn when it ends."""
MOVING = "cyan"
LEAST = 8
"""Shortest useful bar, in columns."""
FREE = 6
"""Columns of a row beside its texts and its bar: three spaces, and room for the ^C that a terminal echoes."""
NORMAL, MIDDLE = 80, 60
"""Columns needed for words and samples per second, for counters beside the bars."""
RATES = len("99,999 updates/s  99,999 samples/s")


class Bar:
    """A live display during the run, and a summary at its end."""

    def __init__(self, status: Status):
        self.status = status
        # a redirected stdout must not be drawn on the terminal
        own_stdout = is_terminal(sys.stdout)
        self.screen: Any = Screen()  # rich itself would end the process when a pipe breaks
        self.console = Console(file=self.screen, highlight=False)
        self.live = Live(self, console=self.console, auto_refresh=False, redirect_stdout=own_stdout)
        if status.opening:
            self.console.print(Text(status.opening, "dim"))
        self._next, self._rows = 0.0, 0
        self.live.start(refresh=True)
        past_display.rows = lambda: self._rows

    def look(self, step: forge.Step) -> float:
        if time.monotonic() >= self._next:
            self.refresh()
            self._next = NEVER if self.screen.gone else time.monotonic() + REFRESH
        return self._next

    def refresh(self) -> None:
        self.live.refresh()
        self._next = 0.0  # redraw soon: this state is short
        if self.screen.gone:
            self._stop()  # stop redirecting prints

    def _stop(self) -> None:
        self.live.stop()
        past_display.rows = None

    def close(self) -> None:
        self._stop()
        status = self.status
        if status.verb == "fit" and status.ending == "done" and not self.screen.gone:
            self.console.print()
            self.console.print(summary(status.all, status.best, status.lines(), status.best_since), soft_wrap=True)

    # -- the picture --------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self.status, options.max_width
        if status.has_epoch_bar:
            yield from self._two(console, options)
        else:
            left, right = self._left(), self._right(wide=width >= NORMAL)
            yield from self._row(console, options, left, self._done(), right, width - len(left) - len(right) - FREE)
        lists = bool(status.metrics) and not (status.ending == "done" and status.verb == "fit")  # else the summary does
        self._rows = 1 + status.has_epoch_bar + lists
        if lists:
            yield self._metrics(width)

    def _two(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the epoch's bar above the run's, of the same length."""
        status, width = self.status, options.max_width
        names = [reading.epoch_of(status), f"update {reading.updates_of(status)}"]
        numbers = [reading.within_epoch(status), reading.share_of(status)] if width >= MIDDLE else ["", ""]
        left_of = f"{reading.clock(status.remaining)} left" if status.remaining is not None else ""
        name, number = (max(map(len, texts)) for texts in (names, numbers))
        wide = width - name - number - RATES - FREE >= 2 * LEAST  # of constants: it must not change while one looks
        now = status.doing or reading.rates_of(status, wide, width >= NORMAL)
        tails = [now, "  ".join(filter(None, [reading.clock(status.elapsed), left_of]))]
        rights = [f"{n:<{number}}  {tail}" if number else tail for n, tail in zip(numbers, tails, strict=True)]
        space = width - name - max(max(map(len, rights)), 30 if width >= MIDDLE else 0) - FREE
        done = [(status.epoch_share or 0.0, 1.0), self._done()]
        for label, each, right in zip(names, done, rights, strict=True):
            yield from self._row(console, options, f"{label:<{name}}", each, right, space)

    def _row(
        self, console: Console, options: ConsoleOptions, left: str, done: Any, right: str, space: int
    ) -> RenderResult:
        """Yield a bar between two texts; `done` is what is done, and the whole."""
        ending = self.status.ending
        yield Segment(f" {left} ", console.get_style(tone(ending)))
        if space >= LEAST:
            style = tone(ending) if ending else MOVING
            bar = ProgressBar(done[1], done[0], space, complete_style=style, finished_style=style)
            yield from bar.__rich_console__(console, options)
        yield Segment(f" {right}")
        yield Segment.line()

    def _done(self) -> tuple[int, int | None]:
        status = self.status
        return status.update, status.update if status.ending and status.planned is None else status.planned

    def _metrics(self, width: int) -> Text:
        """Return as many metrics as fit on one line."""
        text = Text(no_wrap=True)
        for group, values in reading.grouped(self.status.metrics | self.status.of_epoch):
            heading = group
            for name, value in values:
                item = Text.assemble((f"{heading} " if heading else "", "cyan"), (f"{name} ", "bright_black"))
                item.append(value, "bold red" if value in ("nan", "inf", "-inf") else "default")
                gap = "  " if heading or not group else " "
                if len(text) + len(gap) + len(item) > width - 2:
                    return text.append(" …")
                text.append(gap if text else " ").append_text(item)
                heading = ""
        return text

    def _left(self) -> str:
        status = self.status
        if status.verb != "fit":
            return f"{status.verb} {status.ending}".strip()
        return f"{reading.epoch_of(status)}{' ' if status.ending else ''}{status.ending}"

    def _right(self, wide: bool) -> str:
        status = self.status
        if status.verb != "fit":
            return "  ".join(filter(None, [status.doing, reading.clock(status.elapsed)]))
        now = reading.speed_of(status.average_speed if status.ending else status.speed, wide)
        now = now if status.ending else f"{status.doing or now:>{14 if wide else 10}}"
        left = status.remaining if not status.ending else None
        parts = [reading.updates_of(status), now, reading.clock(status.elapsed)]
        return "  ".join(filter(None, [*parts, "" if left is None else f"{reading.clock(left)} left"]))


def tone(ending: str) -> str:
    return {"": "bold", "done": "green", "interrupted": "yellow", "failed": "red"}[ending]
