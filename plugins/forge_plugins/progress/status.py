"""The state that progress displays show."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forge
from forge.metrics.media import is_diagnostic
from forge.runs.directions import mode_of
from forge.runs.summary import folder_lines
from forge.runs.wording import counted, duration, ended, rate
from forge.util.text import visible

NEVER = float("inf")


@dataclass(slots=True)
class Status:
    """The state that displays show."""

    verb: str = ""
    planned: int | None = None
    max_epochs: int | None = None
    update: int = 0
    epoch: int = 1
    "The epoch of the last update, from 1."
    epochs: int = 0
    "Epochs done."
    sample: int = 0
    epoch_share: float | None = None
    "Share of the current epoch that is done; None if its length is unknown."
    per_epoch: int | None = None
    plugins: Collection[str] = ()
    "Names of the stack: diagnostics of plugins are not shown."
    opening: str = ""
    "The first line of a fit."
    metrics: dict[str, float] = field(default_factory=dict)
    of_epoch: dict[str, float] = field(default_factory=dict)
    "Means of an epoch by the names of the interval's, from its end until the next training log."
    bests: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    "(update, value) of every validation better than all before, for metrics with a known direction."
    best_since: int | None = None
    "The update at which a resumed run began this attempt; earlier bests are unknown here."
    logged: int = 0
    "The update of the last training log."
    validated: bool = False
    "Whether a validation has been logged and not shown yet."
    doing: str = ""
    ending: str = ""
    "How the run ended, once it has."
    speed: float = 0.0
    "Recent updates per second, outside of evaluation."
    evaluation_took: float = NEVER
    "Seconds of the last evaluation."
    paused: float = 0.0
    "Seconds of evaluation since the last move."
    reason: str = ""
    was_complete: bool = False
    "Whether the fit resumed a run that was complete, and trained nothing."
    run_dir: Path | None = None
    restores: int = 0
    began: float = field(default_factory=time.monotonic)
    _first: tuple[float, int, int] | None = None
    "Where the speed is measured from: (time, update, sample)."
    _last: tuple[float, int] = (0.0, 0)

    def lines(self) -> dict[str, str]:
        """Return the lines under the summary."""
        done = f"{counted(self.epochs, 'epoch')}, {counted(self.update, 'update')} in {duration(self.elapsed)}"
        rates = [rate(self.average_speed, "updates"), rate(self.average_speed * self.samples_per_update, "samples")]
        found = {"trained": ended(done, self.reason, self.was_complete)}
        if any(rates):
            found["speed"] = f"{', '.join(filter(None, rates))} in all the time after the first update"
        return found | (folder_lines(self.run_dir) if self.run_dir is not None else {})

    @property
    def has_epoch_bar(self) -> bool:
        """Whether the run has several epochs and the position in the epoch is known."""
        return self.verb == "fit" and not self.ending and self.max_epochs != 1 and self.epoch_share is not None

    def move(self, trainer: forge.Run) -> None:
        """Copy the counters, and update the speed."""
        now, progress = time.monotonic(), trainer.progress
        self.update, self.sample, self.epochs = progress.update, progress.sample, progress.epoch
        self.epoch = trainer.step.epoch + 1 if trainer.step is not None else 1
        self.epoch_share, self.per_epoch = share_of_epoch(trainer), trainer.updates_per_epoch
        if self.restores != trainer.restores:
            self.restores, self._first, last = trainer.restores, None, trainer.resumed_from or 0
            self.bests = {name: [each for each in found if each[0] <= last] for name, found in self.bests.items()}
        if self._first is None:
            if self.update:  # the first update is a warm-up (compilers, caches) and is not measured
                self._first, self._last, self.paused = (now, self.update, self.sample), (now, self.update), 0.0
            return
        spent, done = now - self._last[0] - self.paused, self.update - self._last[1]
        if done and spent > 0:
            self.speed = 0.7 * self.speed + 0.3 * done / spent if self.speed else done / spent
            self._last, self.paused = (now, self.update), 0.0

    @property
    def best(self) -> dict[str, tuple[int, float]]:
        """(update, value) of the best validation."""
        return {name: found[-1] for name, found in self.bests.items() if found}

    def log(self, update: int, metrics: Mapping[str, Any]) -> bool:
        """Store the newest scalars; return whether to show them at once."""
        of_epoch: dict[str, float] = {}
        for name, value in metrics.items():
            if not isinstance(value, (int, float)) or is_diagnostic(name, self.plugins):
                continue
            base = name.removesuffix("_epoch")
            if base != name and base in metrics:
                of_epoch[visible(base)] = value
                continue
            self.metrics[visible(name)] = value
            self._compare(update, visible(name), value)
        evaluated = any(name.startswith(("val/", "test/")) for name in metrics)
        if evaluated:
            self.validated = True
        elif any(name.startswith("train/") for name in metrics):
            self.logged, self.of_epoch = update, of_epoch
        return evaluated

    @property
    def shown(self) -> dict[str, float]:
        """The newest values; at an epoch's end its means in place of those of the last interval."""
        means = self.of_epoch
        return {
            f"{name}_epoch" if name in means else name: means.get(name, value) for name, value in self.metrics.items()
        }

    @property
    def all(self) -> dict[str, float]:
        """The newest values, and the means of an epoch that has just ended, for tables."""
        return self.metrics | {f"{name}_epoch": value for name, value in self.of_epoch.items()}

    def _compare(self, update: int, name: str, value: float) -> None:
        mode = mode_of(name) if name.startswith(("val/", "test/")) else None
        if mode is None or not math.isfinite(value):
            return
        sign = 1 if mode == "min" else -1
        found = self.bests.setdefault(name, [])
        if not found or sign * value < sign * found[-1][1]:
            found.append((update, value))

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
    def samples_per_update(self) -> float:
        """0 if samples are not counted."""
        done = 0 if self._first is None else self.update - self._first[1]
        return 0.0 if self._first is None or not done else (self.sample - self._first[2]) / done

    @property
    def remaining(self) -> float | None:
        """Seconds to the end at the average speed."""
        if self.planned is None or not self.average_speed:
            return None
        return max(self.planned - self.update, 0) / self.average_speed


def share_of_epoch(trainer: forge.Run) -> float | None:
    """Return the share of the epoch done by the last update; None without a loader length."""
    feed, step = getattr(trainer, "feed", None), trainer.step
    if feed is None or not feed.length:
        return None
    return 1.0 if step is not None and step.ends_epoch else feed.batches / feed.length
