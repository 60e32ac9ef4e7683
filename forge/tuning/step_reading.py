"""StepReading: one measurement of a training step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def in_ms(ms: float) -> str:
    """Format milliseconds with three digits: 4.07, 15.0, 243."""
    return f"{ms:.2f}" if ms < 9.995 else f"{ms:.1f}" if ms < 99.95 else f"{ms:.0f}"


@dataclass(frozen=True, slots=True)
class StepReading:
    """One measurement of a step."""

    ms: float
    "Milliseconds of an update, the median."
    memory: int | None = None
    "Peak bytes of the device, or of the whole process on a CPU."
    seconds: float = 0.0
    "Seconds until updates ran steadily: building, compiling, warming up."
    same: bool | None = None
    "Whether the weights after some updates have the bits of the start's; None if this is unknown."

    @staticmethod
    def middle(readings: Sequence[StepReading]) -> StepReading:
        """Return several readings of one step as one."""
        known = [reading.same for reading in readings if reading.same is not None]
        return StepReading(
            statistics.median(reading.ms for reading in readings),
            max((reading.memory for reading in readings if reading.memory is not None), default=None),
            max(reading.seconds for reading in readings),
            all(known) if known else None,
        )
