"""A length of a run, as `schedule`, `ema` and `swa` take it: updates, a share of the run, or an interval."""

from __future__ import annotations

import forge
from forge.errors import ForgeError, RecipeError


def check_length(length: int | float | str, option: str) -> None:
    """Refuse what is no length of a run: updates, a share of the run, or an interval in updates or epochs."""
    if isinstance(length, str):
        if forge.Interval(length).unit not in ("update", "epoch"):
            raise RecipeError(f"{option} is {length!r}: it can be counted in updates or epochs.")
    elif length < 0 or (isinstance(length, float) and length >= 1):
        raise RecipeError(
            f"{option} is {length!r}. Write updates as a whole number (500), a share of the run below 1 (0.75), or an "
            "interval ('500 updates', '3 epochs')."
        )


def updates_of(length: int | float | str, trainer: forge.Run, option: str) -> int:
    """A length in updates, as far as this run can tell."""
    if isinstance(length, float):
        if trainer.planned_updates is None and length:
            raise ForgeError(
                f"{option} is {length:g} of the run, but nobody knows how many updates the run has. Set max_updates, "
                f"use a train loader with a length and max_epochs, or give {option} in updates."
            )
        return round(length * (trainer.planned_updates or 0))
    if isinstance(length, int):
        return length
    interval = forge.Interval(length)
    if interval.unit == "update":
        return int(interval.count)
    if trainer.updates_per_epoch is None:
        raise ForgeError(
            f"{option} is {length!r}, but the train loader has no length, so nobody knows how many updates an epoch "
            f"has. Give {option} in updates."
        )
    return int(interval.count) * trainer.updates_per_epoch


def moment(text: str, option: str) -> forge.Interval:
    """The moment that an option names. A clock's is refused: a resumed run would come to it elsewhere."""
    try:
        interval = forge.Interval(text)
    except ForgeError as error:
        raise RecipeError(f"{option}: {error}") from error
    if interval.unit == "second":
        raise RecipeError(
            f"{option} is {text!r}: write it in updates, epochs or samples ('500 updates', '3 epochs'). A clock would "
            "come to another update each time the run is made."
        )
    return interval


def reached(at: forge.Interval, *, updates: int, epochs: int, samples: int) -> bool:
    """Whether a run that has done so much has come to the moment, or is past it."""
    return {"update": updates, "epoch": epochs, "sample": samples}[at.unit] >= at.count
