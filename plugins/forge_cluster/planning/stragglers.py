"""Stragglers: ranks wait for the slowest of them, so small differences cost more the more ranks there are."""

from __future__ import annotations

import math
import random

STEPS = 4000
REACH = 8.0


def expected_maximum(ranks: int) -> float:
    """Return the mean of the largest of `ranks` standard normal numbers, by integration."""
    if ranks == 1:
        return 0.0
    width = 2 * REACH / STEPS
    total = 0.0
    for step in range(STEPS):
        x = -REACH + (step + 0.5) * width
        below = 0.5 * math.erfc(-x / math.sqrt(2))
        total += (1 - below**ranks) if x > 0 else -(below**ranks)
    return total * width


def slowdown(ranks: int, jitter: float, waits: int = 1) -> float:
    """Return the factor of an update's time when ranks that differ by `jitter` wait for each other `waits` times.

    Noise that is spread over several waits is smaller at each of them, by the root of their number.
    """
    return 1 + expected_maximum(ranks) * jitter * math.sqrt(waits)


def simulate_stragglers(ranks: int, jitter: float, updates: int, waits: int = 1, seed: int = 0) -> float:
    """Return the same factor by Monte Carlo: every rank draws its time, and all wait for the slowest."""
    draw = random.Random(seed)
    total = 0.0
    for _ in range(updates):
        for _ in range(waits):
            part = 1 / waits
            total += max(draw.gauss(part, jitter * part * math.sqrt(waits)) for _ in range(ranks))
    return total / updates
