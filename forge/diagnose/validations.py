"""Warnings about runs that compare validations and have none."""

from __future__ import annotations

import logging

from forge.contract.run import Run

logger = logging.getLogger("forge")


def warn_of_none_planned(trainer: Run, who: str) -> None:
    """Warn at the start of a fit that no validation is planned."""
    if trainer.validate_every is None and trainer.env.is_main:
        logger.warning("%s: validate_every is null, so nothing is compared unless a validation is requested.", who)


def warn_of_nothing_compared(trainer: Run, who: str, why: str | None = None) -> None:
    """Warn at the end of a fit that nothing was compared: no validation ran, or none counted (`why`)."""
    if trainer.env.is_main:
        logger.warning("%s compared nothing: %s", who, why or "this run ended before its first validation.")
