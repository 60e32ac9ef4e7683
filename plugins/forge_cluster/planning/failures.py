"""Failures, event by event: what share of the time a run makes progress, and how often it should be saved.

A run works for an interval, saves, and goes on; a failure takes it back to the last finished save, after a restart.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

YEAR = 365.25 * 24 * 3600
RUNS = 8
POINTS = 17


@dataclass(frozen=True, slots=True)
class ExpectedGoodput:
    """The expected progress of a run with failures."""

    share: float
    "Seconds of progress per second."
    interval: float
    "Seconds of work between two checkpoints that give it, by simulation."
    young: float
    "Young's closed form of the best interval: the root of twice save times mean time between failures."
    daly: float
    "Daly's second order of it."
    failures_per_day: float


def young(save: float, between_failures: float) -> float:
    """Return the best interval by Young, 1974."""
    return math.sqrt(2 * save * between_failures)


def daly(save: float, between_failures: float) -> float:
    """Return the best interval by Daly, 2006; beyond a save of twice the time between failures, that time itself."""
    if save >= 2 * between_failures:
        return between_failures
    ratio = math.sqrt(save / (2 * between_failures))
    return math.sqrt(2 * save * between_failures) * (1 + ratio / 3 + ratio**2 / 9) - save


def expected_share(interval: float, save: float, restart: float, between_failures: float) -> float:
    """Return the exact expectation for failures without memory (Daly, 2006)."""
    mean = between_failures
    return interval / (mean * math.exp(restart / mean) * math.expm1((interval + save) / mean))


def simulate_failures(
    work: float, interval: float, save: float, restart: float, between_failures: float, draw: random.Random
) -> float:
    """Return the seconds that a run of `work` seconds takes; failures also come while it saves and restarts."""
    now = done = 0.0
    fails_at = draw.expovariate(1 / between_failures)
    while done < work:
        left = work - done
        needs = left + math.ceil(left / interval) * save
        if fails_at >= now + needs:
            return now + needs
        done += math.floor((fails_at - now) / (interval + save)) * interval  # whole intervals, each saved
        now = fails_at
        while True:
            fails_at = now + draw.expovariate(1 / between_failures)
            if fails_at >= now + restart:
                now += restart
                break
            now = fails_at
    return now


def goodput(gpus: int, failures_per_year: float, save: float, restart: float, seed: int = 0) -> ExpectedGoodput:
    """Simulate runs with intervals around Young's, each with the same failures, and return the best."""
    if failures_per_year <= 0:
        return ExpectedGoodput(1.0, math.inf, math.inf, math.inf, 0.0)
    mean = YEAR / failures_per_year / gpus
    start = young(save, mean)
    work = 200 * mean
    tried: list[tuple[float, float]] = []
    for point in range(POINTS):
        interval = start * 4 ** (2 * point / (POINTS - 1) - 1)
        walls = [simulate_failures(work, interval, save, restart, mean, random.Random(seed + k)) for k in range(RUNS)]
        tried.append((interval, work / (sum(walls) / RUNS)))
    interval = _peak(tried)
    return ExpectedGoodput(
        share=max(share for _, share in tried),
        interval=interval,
        young=start,
        daly=daly(save, mean),
        failures_per_day=24 * 3600 / mean,
    )


def _peak(tried: list[tuple[float, float]]) -> float:
    """Return the minimum of a curve of degree 4 through the time lost: single points are noisy."""
    import numpy as np

    x = np.log([interval for interval, _ in tried])
    curve = np.polynomial.Polynomial.fit(x, [1 / share - 1 for _, share in tried], 4)
    fine = np.linspace(x[0], x[-1], 400)
    return float(np.exp(fine[np.argmin(curve(fine))]))
