"""Progress on the screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

import forge
from forge.metrics import is_diagnostic

REFRESH = 0.25
"""Seconds between two pictures of the bar; there is no thread, so a slow step is drawn when it ends."""
NEVER = float("inf")
STAGES = {"val": "validating", "test": "testing", "predict": "predicting"}
FIRST = ("train", "val", "test", "lr")
"""Metrics are shown in this order, all others after them."""


class Progress(forge.Plugin):
    """Show how far the run is, how fast, how long it will take, and the latest metrics.

    On a terminal this is a live bar that leaves what you print alone. Anywhere else (a file, CI) it is a plain line per
    interval, at the end of every epoch, after every validation and at the end of the run. Both go to stderr, so that
    stdout stays yours. Only the main process shows anything. Where stderr can be written no longer (a pipe whose reader
    is gone), it falls silent, and the run goes on.

    ::

        forge fit quickstart progress.every="10 updates"
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: str = "10 s"
        "How often to write a line where the output is no terminal, beside epochs and validations."

    config: Config
    observer = True

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        forge.Interval(self.config.every)  # refuses now what is no interval
        self._view: View | None = None
        self._look_at = NEVER
        self._status = Status()

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        if not trainer.env.is_main:
            return
        plan = trainer.planned_updates, trainer.max_epochs
        self._status = Status(trainer.verb or "", *plan, plugins=trainer.stack.names)
        self._view = Bar(self._status) if on_terminal() else Lines(self._status, forge.Interval(self.config.every))
        self._look_at = 0.0

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Trainer, step: forge.Step) -> None:
        # every update passes here: one look at the clock, and out
        if (time.monotonic() >= self._look_at or step.ends_epoch) and self._view is not None:
            self._status.move(trainer)
            self._look_at = self._view.look(step)

    @forge.hookimpl
    def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
        if self._view is not None and self._status.log(update, metrics):
            self._look_at = 0.0

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Trainer, stage: str) -> Generator[None, Any, Any]:
        if self._view is None:
            return (yield)
        self._status.move(trainer)
        self._status.doing, began = STAGES.get(stage, stage), time.monotonic()
        if self._status.evaluation_took > REFRESH:  # a short one would be gone before it is read
            self._view.refresh()
        try:
            return (yield)
        finally:
            self._status.doing, self._status.evaluation_took = "", time.monotonic() - began
            self._status.paused += self._status.evaluation_took

    @forge.hookimpl
    def forge_exception(self, error: BaseException) -> None:
        self._status.ending = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"

    @forge.hookimpl
    def forge_end(self, trainer: forge.Trainer) -> None:
        view, self._view, self._look_at = self._view, None, NEVER
        if view is not None:
            self._status.move(trainer)
            self._status.ending = self._status.ending or "done"
            view.close()


@dataclass(slots=True)
class Status:
    """What there is to show."""

    verb: str = ""
    planned: int | None = None
    max_epochs: int | None = None
    update: int = 0
    epoch: int = 1
    "The epoch of the last update, from 1."
    plugins: Collection[str] = ()
    "Names of the stack: what a plugin says of itself is not for the screen."
    metrics: dict[str, float] = field(default_factory=dict)
    logged: int = 0
    "The update of the last training log."
    validated: bool = False
    "Whether a validation has been logged and not been written about."
    doing: str = ""
    ending: str = ""
    "How the run ended, once it has."
    speed: float = 0.0
    "Updates per second, lately and outside of evaluation."
    evaluation_took: float = NEVER
    "Seconds of the last evaluation."
    paused: float = 0.0
    "Seconds of evaluation since the last move."
    began: float = field(default_factory=time.monotonic)
    _first: tuple[float, int] | None = None
    _last: tuple[float, int] = (0.0, 0)

    def move(self, trainer: forge.Trainer) -> None:
        """Take the counters over, and see how fast they grow."""
        now, self.update = time.monotonic(), trainer.progress.update
        self.epoch = trainer.step.epoch + 1 if trainer.step is not None else 1
        if self._first is None:
            if self.update:  # the first update warms things up (compilers, caches): it counts for no speed
                self._first = self._last = (now, self.update)
                self.paused = 0.0
            return
        spent, done = now - self._last[0] - self.paused, self.update - self._last[1]
        if done and spent > 0:
            self.speed = 0.7 * self.speed + 0.3 * done / spent if self.speed else done / spent
            self._last, self.paused = (now, self.update), 0.0

    def log(self, update: int, metrics: Mapping[str, Any]) -> bool:
        """Keep the newest scalars; whether they are worth a look at once."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not is_diagnostic(name, self.plugins):
                self.metrics[name] = value
        evaluated = any(name.startswith(("val/", "test/")) for name in metrics)
        if evaluated:
            self.validated = True
        elif any(name.startswith("train/") for name in metrics):
            self.logged = update
        return evaluated

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def average_speed(self) -> float:
        """Updates per second over the whole run, evaluation included."""
        if self._first is None:
            return 0.0
        spent, done = time.monotonic() - self._first[0], self.update - self._first[1]
        return done / spent if spent > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds to the end, if everything goes on as it went."""
        if self.planned is None or not self.average_speed:
            return None
        return max(self.planned - self.update, 0) / self.average_speed


class View(Protocol):
    """A way to show a Status."""

    def look(self, step: forge.Step) -> float:
        """An update has ended. Show what is due, and return when (on the monotonic clock) to be asked again."""
        ...

    def refresh(self) -> None:
        """Something else has changed."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Screen:
    """stderr, until it fails for the first time; then nothing more is written, because a run is worth more."""

    def __init__(self) -> None:
        self.stream, self.gone = sys.stderr, False

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _try(self, action: Callable[[], Any]) -> None:
        if not self.gone:
            try:
                action()
            except OSError:
                self.gone = True


# ---------------------------------------------------------------------------------------------------------------------
# On a terminal


class Bar:
    """A bar with counters, and the latest metrics under it."""

    def __init__(self, status: Status):
        self.status = status
        # a stdout that goes elsewhere must not be drawn into the terminal
        own_stdout = bool(getattr(sys.stdout, "isatty", bool)())
        self.screen: Any = Screen()  # rich itself would end the process when a pipe breaks
        self.live = Live(self, console=Console(file=self.screen), auto_refresh=False, redirect_stdout=own_stdout)
        self.live.start(refresh=True)
        self._next = 0.0

    def look(self, step: forge.Step) -> float:
        if time.monotonic() >= self._next:
            self.refresh()
            self._next = NEVER if self.screen.gone else time.monotonic() + REFRESH
        return self._next

    def refresh(self) -> None:
        self.live.refresh()
        self._next = 0.0  # what is shown now passes soon
        if self.screen.gone:
            self.live.stop()  # what others print goes its own way again

    def close(self) -> None:
        self.live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self.status, options.max_width
        left, right = self._left(), self._right(wide=width >= 100)
        space = width - len(left) - len(right) - 4
        yield Segment(f" {left} ", console.get_style(_tone(status.ending)))
        if space >= 8:
            yield from self._bar(space).__rich_console__(console, options)
        yield Segment(f" {right}")
        yield Segment.line()
        if status.metrics:
            yield self._metrics(width)

    def _metrics(self, width: int) -> Text:
        """As many whole metrics as fit on one line."""
        text = Text(no_wrap=True)
        for group, values in grouped(self.status.metrics):
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

    def _bar(self, width: int) -> ProgressBar:
        status, tone = self.status, _tone(self.status.ending)
        total = status.planned
        if status.ending and total is None:
            total = status.update  # nothing moves any more
        if not status.ending:
            return ProgressBar(total, status.update, width)
        return ProgressBar(total, status.update, width, complete_style=tone, finished_style=tone)

    def _left(self) -> str:
        status = self.status
        if status.verb != "fit":
            return f"{status.verb} {status.ending}".strip()
        return f"{epoch_of(status)}{' ' if status.ending else ''}{status.ending}"

    def _right(self, wide: bool) -> str:
        status = self.status
        if status.verb != "fit":
            return "  ".join(filter(None, [status.doing, clock(status.elapsed)]))
        if status.ending:
            parts = [updates_of(status), speed_of(status.average_speed, wide), clock(status.elapsed)]
        else:
            now = status.doing or speed_of(status.speed, wide)
            parts = [updates_of(status), f"{now:>{14 if wide else 10}}", clock(status.elapsed)]
        if status.remaining is not None and not status.ending:
            parts.append(f"{clock(status.remaining)} left")
        return "  ".join(filter(None, parts))


def _tone(ending: str) -> str:
    return {"": "bold", "done": "green", "interrupted": "yellow", "failed": "red"}[ending]


def on_terminal() -> bool:
    """Whether stderr is a terminal that can redraw; a forced colour does not make a file one."""
    isatty = getattr(sys.stderr, "isatty", None)
    return bool(isatty and isatty()) and not Console(stderr=True).is_dumb_terminal


# ---------------------------------------------------------------------------------------------------------------------
# Anywhere else


class Lines:
    """One plain line per interval, epoch and validation."""

    def __init__(self, status: Status, every: forge.Interval):
        self.status, self.every = status, every
        self._seconds = every.count if every.unit == "second" else 0.0
        self._next = time.monotonic() + self._seconds
        self._owed = False
        self._screen = Screen()

    def look(self, step: forge.Step) -> float:
        status = self.status
        if step.ends_epoch and status.logged < status.update:
            self._owed = True  # on an accelerator the epoch's last metrics arrive with the next update
            return 0.0
        if step.ends_epoch or self._owed or status.validated or self._interval_ended(step):
            self._write(self._line())
            self._owed = status.validated = False
            self._next = time.monotonic() + self._seconds
        return self._next if self._seconds else 0.0

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        status = self.status
        if status.verb != "fit":
            self._write(f"{status.verb} {status.ending} in {clock(status.elapsed)}{_listed(status.metrics)}")
            return
        parts = [status.ending, epoch_of(status), f"update {updates_of(status)}", f"in {clock(status.elapsed)}"]
        parts.append(speed_of(status.average_speed, wide=True))
        self._write("  ".join(filter(None, parts)) + _listed(status.metrics))

    def _interval_ended(self, step: forge.Step) -> bool:
        return time.monotonic() >= self._next if self._seconds else self.every.due(step)

    def _line(self) -> str:
        status = self.status
        parts = [epoch_of(status), f"update {updates_of(status)}", speed_of(status.speed, False)]
        if status.remaining is not None:
            parts.append(f"{clock(status.remaining)} left")
        return "  ".join(filter(None, parts)) + _listed(status.metrics)

    def _write(self, text: str) -> None:
        print(text, file=self._screen, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# How things read


def epoch_of(status: Status) -> str:
    """ "epoch  3/10", or "epoch 3" where nobody set an end."""
    if status.max_epochs is None:
        return f"epoch {status.epoch}"
    return f"epoch {status.epoch:>{len(str(status.max_epochs))}}/{status.max_epochs}"


def updates_of(status: Status) -> str:
    """ "240/600", padded so that it does not move as it grows."""
    if status.planned is None:
        return f"{status.update}"
    return f"{status.update:>{len(str(status.planned))}}/{status.planned}"


def speed_of(speed: float, wide: bool) -> str:
    """ "143/s", or for slow steps "2.5 s each"; empty while it is not known."""
    if not speed:
        return ""
    if speed < 1:
        return f"{1 / speed:.3g} s/update"
    return (
        f"{speed:,.0f}{' updates' if wide else ''}/s" if speed >= 100 else f"{speed:.1f}{' updates' if wide else ''}/s"
    )


def clock(seconds: float) -> str:
    """ "0:07", "12:34", "1:02:03"."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def short(name: str, value: float) -> str:
    """A few digits, of a width that seldom changes."""
    size = abs(value)
    if isinstance(value, int) or 1e4 <= size < 1e7:
        return f"{value:,.0f}"
    if name.partition("/")[0] == "lr":
        return f"{value:.3g}"
    if size == 0 or 0.01 <= size < 10:
        return f"{value:.4f}"
    return f"{value:#.4g}".rstrip(".") if 1e-3 <= size < 1e4 else f"{value:.2e}"


def ordered(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, short value), training first."""

    def rank(name: str) -> int:
        head = name.partition("/")[0]
        return FIRST.index(head) if head in FIRST else len(FIRST)

    return [(name, short(name, metrics[name])) for name in sorted(metrics, key=rank)]


def grouped(metrics: Mapping[str, float]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Metrics by what is before the first slash: ("train", [("loss", "0.1234"), ...])."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in ordered(metrics):
        head, slash, rest = name.partition("/")
        groups.setdefault(head if slash else "", []).append((rest or head, value))
    yield from groups.items()


def _listed(metrics: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value}" for name, value in ordered(metrics))
