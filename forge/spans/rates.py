"""Rates of updates: samples, tokens and FLOPs a second, times of steps, and the share of waiting for data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from forge.util.text import duration

TimedUpdate = tuple[int, float, float, float]
"""An update: its samples, what they consist of (tokens, say), the seconds of waiting for them, and those of all."""


def rates(
    updates: Sequence[TimedUpdate], items: str | None, flops: float | None = None, peak: float | None = None
) -> dict[str, float]:
    """Return the rates of some updates. `items` is the name of what they consist of, `flops` the FLOPs of a sample, and
    `peak` those that the device can compute in a second."""
    if not updates:
        return {}
    samples, counts, waits, times = zip(*updates, strict=True)
    seconds, every = sum(times), sum(samples)
    if not seconds:
        return {}
    found = {"samples_per_s": every / seconds}
    if items is not None:
        found[f"{items}_per_s"] = sum(counts) / seconds
    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        found[f"step_ms_{name}"] = 1e3 * percentile(times, share)
    found["data_wait_share"] = sum(waits) / seconds
    if flops is not None:
        found["tflops"] = flops * every / seconds / 1e12
        found |= {} if peak is None else {"mfu": flops * every / seconds / peak}
    return found


def percentile(times: Iterable[float], share: float) -> float:
    """Return the time that a share of the `times` does not exceed."""
    ordered = sorted(times)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def as_sentence(found: dict[str, float]) -> str:
    """Return rates as one line."""
    parts = [
        f"{value:,.4g} {name.removesuffix('_per_s')}/s" for name, value in found.items() if name.endswith("_per_s")
    ]
    median, most, slowest = (duration(found[f"step_ms_{name}"] / 1e3) for name in ("p50", "p95", "max"))
    parts.append(f"{median} per step at the median (95% within {most}, slowest {slowest})")
    parts.append(f"{found['data_wait_share']:.1%} of the time waiting for data")
    parts += [f"{found['tflops']:.4g} TFLOP/s"] if "tflops" in found else []
    parts += [f"{found['mfu']:.1%} of the peak"] if "mfu" in found else []
    return f"{', '.join(parts)}; in steps, without logs, validation and saves"
