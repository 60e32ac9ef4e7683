"""What to say where no validation comes, which `early_stop` and `checkpoint.best` wait for."""

from __future__ import annotations

import logging

import forge

logger = logging.getLogger("forge")


def warn_of_none_planned(trainer: forge.Run, who: str) -> None:
    """At a fit's start: nothing is validated by itself."""
    if trainer.validate_every is None and trainer.env.is_main:
        logger.warning("%s: validate_every is null, so nothing is compared unless a validation is asked for.", who)


def warn_of_nothing_compared(trainer: forge.Run, who: str, why: str | None = None) -> None:
    """At a fit's end: no validation came, as where `validate_every` is longer than the run, or `why` none counted."""
    if trainer.env.is_main:
        logger.warning("%s compared nothing: %s", who, why or "this run ended before its first validation.")
