"""Warn of metrics of an evaluation that are NaN or infinite."""

from __future__ import annotations

import logging
import math
from typing import Any
from weakref import WeakKeyDictionary

from forge.contract.requests import Requests
from forge.contract.run import Run

logger = logging.getLogger("forge")

_warned: WeakKeyDictionary[Requests, set[str]] = WeakKeyDictionary()
"""The metrics that a run was warned of, by its requests, which are new in every run."""


def warn_of_non_finite(trainer: Run, metrics: dict[str, Any]) -> dict[str, Any]:
    """Warn of each metric that is not finite, once in a run; return the metrics."""
    warned = _warned.setdefault(trainer.requests, set())
    bad = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, float) and not math.isfinite(value) and name not in warned
    }
    warned.update(bad)
    if bad and trainer.env.is_main:
        found = ", ".join(f"{name} is {value}" for name, value in bad.items())
        logger.warning("At update %d %s. Such a value is never the best one.", trainer.progress.update, found)
    return metrics
