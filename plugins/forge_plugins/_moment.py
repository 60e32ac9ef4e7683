"""A moment of a run, as `early_stop` and `freeze` take it: so many updates, epochs or samples after its beginning."""

from __future__ import annotations

import forge
from forge.errors import ForgeError, RecipeError


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
