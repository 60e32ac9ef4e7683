"""Options that name a length of a run, or a moment in it.

A length is a number of updates, a share of the run, or an interval. A moment is in updates, epochs or samples since the
start.
"""

from __future__ import annotations

from forge.contract.run import Run
from forge.errors import ForgeError, RecipeError
from forge.progress import Interval


def check_length(length: int | float | str, option: str) -> None:
    """Raise a RecipeError unless it is a number of updates, a share of the run, or an interval in updates or epochs."""
    if isinstance(length, str):
        if Interval(length).unit not in ("update", "epoch"):
            raise RecipeError(f"{option} is {length!r}; write it in updates or epochs.")
    elif length < 0 or (isinstance(length, float) and length >= 1):
        raise RecipeError(
            f"{option} is {length!r}. Write updates as a whole number (500), a share of the run below 1 (0.75), or an "
            "interval ('500 updates', '3 epochs')."
        )


def updates_of(length: int | float | str, trainer: Run, option: str) -> int:
    """Return a length in updates of this run; raise a ForgeError if the run's own length is needed and unknown."""
    if isinstance(length, float):
        if trainer.planned_updates is None and length:
            raise ForgeError(
                f"{option} is {length:g} of the run, but the run's number of updates is unknown. Set max_updates, "
                f"use a train loader with a length and max_epochs, or give {option} in updates."
            )
        return round(length * (trainer.planned_updates or 0))
    if isinstance(length, int):
        return length
    interval = Interval(length)
    if interval.unit == "update":
        return int(interval.count)
    if trainer.updates_per_epoch is None:
        raise ForgeError(
            f"{option} is {length!r}, but the train loader has no length, so the number of updates per epoch is "
            f"unknown. Give {option} in updates."
        )
    return int(interval.count) * trainer.updates_per_epoch


def moment(text: str, option: str) -> Interval:
    """Parse a moment. Wall-clock time is refused: a resumed run would reach it at another update."""
    try:
        interval = Interval(text)
    except ForgeError as error:
        raise RecipeError(f"{option}: {error}") from error
    if interval.unit == "second":
        raise RecipeError(
            f"{option} is {text!r}: write it in updates, epochs or samples ('500 updates', '3 epochs'). Wall-clock "
            "time falls on another update in every run."
        )
    return interval


def reached(at: Interval, *, updates: int, epochs: int, samples: int) -> bool:
    """Whether a run with these counts has reached the moment or is past it."""
    return {"update": updates, "epoch": epochs, "sample": samples}[at.unit] >= at.count
