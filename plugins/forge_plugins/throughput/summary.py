"""Log messages: FLOPs with the peak, and a summary of the run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge.runs.wording import rate
from forge.util.clock import Totals, duration, percentile
from forge.util.text import format_bytes
from forge_plugins.throughput.flops import Count
from forge_plugins.throughput.memory_use import Breakdown


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def of_flops(
    counts: Mapping[str | None, tuple[Count, float]], dtype: str | None, device: str, peak: float | None, given: bool
) -> str:
    """Return a text of the counts, the formula of MFU, and the operations not counted."""
    each: list[str] = []
    for name, (count, samples) in counts.items():
        shares = [f"{flops / count.total:.0%} {kind}" for kind, flops in count.by_dtype.most_common() if flops]
        kinds, turn = f" ({', '.join(shares)})" if shares else "", "" if name is None else f"{name}: "
        each.append(f"{turn}{scaled(count.total)}FLOP for {samples:g} samples{kinds}")
    lines = [f"{'; '.join(each)}."]
    if peak is not None:
        source = "throughput.peak" if given else f"the data sheet's dense {dtype} peak of {device}"
        lines.append(f"MFU = FLOP/s ÷ {peak:,.6g} TFLOP/s, {source}.")
    elif dtype is not None:
        lines.append(f"The {dtype} peak of {device} is unknown, so MFU is not logged. Set throughput.peak=TFLOP/s.")
    unknown = sorted({op for count, _ in counts.values() for op in count.unknown})
    if unknown:
        lines.append(f"Not counted, because they have no formula: {', '.join(unknown)}.")
    return " ".join(lines)


def of_run(total: Totals, items: str | None, peak: float | None, breakdown: Breakdown | None) -> str:
    """Return one line about the whole run."""
    rates = [rate(total.rate(total.samples), "samples")]
    if items is not None:
        rates.append(rate(float(total.rate(total.items)), items) or f"0 {items}/s")
    parts = [f"{', '.join(rates)} in steps, without logs, validation and saves"]
    median, most, slowest = (duration(percentile(total.times, share)) for share in (0.5, 0.95, 1.0))
    parts.append(f"{median} per step at the median (95% within {most}, slowest {slowest})")
    parts.append(f"{total.rate(total.waited):.1%} of the time waiting for data")
    speed = total.flops_per_second
    if speed is not None:
        parts.append(f"{scaled(speed)}FLOP/s" + (f", {speed / peak:.1%} of the peak" if peak else ""))
    if breakdown is not None:
        parts.append(f"{format_bytes(breakdown.peak)} of memory at the peak")
    return "; ".join(parts) + "."


def scaled(number: float) -> str:
    """Return a number with its prefix: "1.23 G"."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.4g} P"
