"""The length of a run in time, and the least number of epochs and updates."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import forge
from forge.contract.requests import SIGNAL
from forge.errors import ForgeError, RecipeError

logger = logging.getLogger("forge")


class Duration(forge.Plugin):
    """End a run after a time, and let nothing end it before a number of epochs or updates.

    `Trainer(max_time="00:10:00")`, `min_epochs=` and `min_updates=` turn it on, as do `trainer.max_time=...` and so on
    in a recipe or on the command line; there is no need to add it to a stack.

    `max_time` counts the time in which the run trains, over all its attempts: it is saved in checkpoints. The run
    stops after the update in which the time is over, saves its state and exports its weights. Resumed with a larger
    `max_time` it continues there.

    Before `min_epochs` and `min_updates` no plugin ends the run: not `early_stop`, and not `max_time`. What asks for a
    stop before that is passed over, and asks again: `early_stop` after the next validation, `max_time` after the next
    update. A signal stops the run at any time, and `max_epochs` and `max_updates` hold in any case.

    When to use it: `max_time` for a fixed slot of a cluster or a fair comparison by time; the others beside
    `early_stop`. A run that only time ends needs no `max_epochs`.

    Together with: schedules that need the length of the run need `max_epochs` or `max_updates` beside `max_time`. On
    several ranks the clock is rank 0's, and all ranks stop at the same update.

    ::

        forge fit quickstart trainer.max_time="10 min"
        forge fit quickstart -p early_stop trainer.min_epochs=5
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        max_time: str | int | None = None
        "Time after which the run ends: 00:10:00 (hours, minutes, seconds), 10 min, 2 h; a number is seconds."
        min_epochs: int | None = None
        "Epochs before which nothing but a signal ends the run."
        min_updates: int | None = None
        "Updates before which nothing but a signal ends the run."

    config: Config
    provides = ("duration",)
    cures = {"endless": "max_time"}
    observer = True  # no update differs: only how many there are, as with max_epochs

    def __init__(self, *first: str | int, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        self._seconds = None if config.max_time is None else seconds_of(config.max_time)
        if self._seconds is None:
            self.cures = {}
        for name in ("min_epochs", "min_updates"):
            if (getattr(config, name) or 1) < 1:
                raise RecipeError(f"{name} is {getattr(config, name)}; it must be at least 1.")
        self._forget()

    def _forget(self) -> None:
        self._began, self._before, self._spent = time.monotonic(), 0.0, 0.0
        "When this attempt began, the seconds of earlier ones, and those of all up to the last update."
        self._passed_over: set[str] = set()
        "Who asked for a stop too early; each is logged once."

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        for limit, least in (("max_epochs", self.config.min_epochs), ("max_updates", self.config.min_updates)):
            most = getattr(trainer, limit)
            if most is not None and least is not None and least > most:
                raise ForgeError(f"{limit.replace('max', 'min')} is {least}, and {limit} is {most}: it cannot be less.")
        self.after = tuple(plugin.name for plugin in trainer.stack if plugin is not self)  # hears of all stops

    @forge.hookimpl
    def forge_start(self) -> None:
        self._forget()

    @forge.hookimpl(wrapper=True)
    def forge_boundary(self, trainer: forge.Run) -> Generator[None, Any, Any]:
        result = yield
        self._spent = self._before + time.monotonic() - self._began
        self._judge(trainer)
        return result

    def _judge(self, trainer: forge.Run) -> None:
        """Ask for a stop if the time is over, and pass over every stop that comes too early."""
        if self._seconds is not None and trainer.env.is_main and self._spent >= self._seconds:
            trainer.request_stop(f"max_time={self.config.max_time} is over", by=self.name)
        asked, config, done = trainer.requests.open.get("stop"), self.config, trainer.progress
        if asked is None or asked.asker == SIGNAL:
            return
        if done.epoch < (config.min_epochs or 0) or done.update < (config.min_updates or 0):
            trainer.requests.grant("stop")
            if asked.asker not in self._passed_over and trainer.env.is_main:
                self._passed_over.add(asked.asker)
                least = f"min_epochs={config.min_epochs}" if config.min_epochs else f"min_updates={config.min_updates}"
                logger.info("The stop that %s asks for is passed over before %s.", asked.asker, least)

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"seconds": self._spent} if self._seconds is not None else {}

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        self._began, self._before = time.monotonic(), state.get("seconds", 0.0)
        self._spent = self._before
        self._judge(trainer)


def seconds_of(text: str | int) -> float:
    """Return a duration in seconds: "00:10:00", "10 min", "2 h", "01:00:00:00" (a day), or a number of seconds."""
    if isinstance(text, int):
        parts = [text]
    elif re.fullmatch(r"\d+(:\d+){1,3}", text.strip()):
        parts = [int(part) for part in text.split(":")]
    else:
        try:
            interval = forge.Interval(text)
        except ForgeError:
            interval = None
        parts = [interval.count if interval is not None and interval.unit == "second" else 0]
    seconds = sum(part * unit for part, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False))
    if seconds <= 0:
        raise RecipeError(f"max_time is {text!r}: write a time, as in '00:10:00', '10 min' or '2 h'.")
    return float(seconds)
