"""Format numbers and times for tables and pages."""

from __future__ import annotations

import math
import time
from typing import Any

from forge.runs.spread import Spread
from forge.util import text


def number(value: Any) -> str:
    """Format a number: ints in full, floats with five significant digits, the mean of a group with its deviation."""
    if isinstance(value, Spread) and math.isfinite(value.std):
        return deviating(float(value), value.std)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e9 else f"{value:.5g}"


def deviating(mean: float, std: float) -> str:
    """ "0.9712 ± 0.0031": two digits of the deviation, and as many decimals of the mean."""
    decimals = 1 - math.floor(math.log10(std)) if std else 0
    if not std or abs(mean) >= 1e5 or decimals > 6:
        return f"{number(mean)} ± {number(std) if not std else f'{std:.2g}'}"
    return f"{mean:.{max(0, decimals)}f} ± {std:.{max(0, decimals)}f}"


def count(value: Any) -> str:
    """ "85,002", "10.8 million", "1.3 billion"; empty for other values."""
    if type(value) is not int or value >= 2**63:
        return ""
    for name, unit in (("billion", 10**9), ("million", 10**6)):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:,}"


def counted(number: int, noun: str) -> str:
    """ "1 epoch", "12,000 updates"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ended(done: str, reason: str, was_complete: bool = False) -> str:
    """ "3 epochs, as planned (max_epochs)", or "3 epochs: " and the reason for the stop."""
    if was_complete:
        return f"nothing: this run was already complete ({done})"
    if reason in ("max_epochs", "max_updates"):
        return f"{done}, as planned ({reason})"
    return f"{done}: {reason}" if reason else done


def rate(value: float, noun: str) -> str:
    """ "93.5 updates/s"; empty for zero."""
    if not value:
        return ""
    return f"{value:,.0f} {noun}/s" if value >= 100 else f"{value:.3g} {noun}/s"


def signed(value: float) -> str:
    text = number(value)
    return text if text.startswith("-") or not value else f"+{text}"


def duration(seconds: float) -> str:
    """ "4.2 s", "3 min 20 s", "2 h 05 min", "3 d 04 h"."""
    return f"{seconds:.1f} s" if seconds < 60 else text.duration(seconds)


def moment(seconds: float) -> str:
    """Format a time in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


def short_moment(seconds: float) -> str:
    """Format a time, without the year if it is the current one."""
    then, now = time.localtime(seconds), time.localtime()
    return time.strftime("%m-%d %H:%M" if then.tm_year == now.tm_year else "%Y-%m-%d", then) if seconds else ""


def kept_options(kept: Any) -> str:
    """Format the options that a resumed optimizer kept: "AdamW lr=0.01 (0.5 is not used)"."""
    options = [option for option in kept if isinstance(option, dict)] if isinstance(kept, list) else []
    return ", ".join(
        f"{option.get('optimizer')} {option.get('option')}={option.get('used')!r} ({option.get('given')!r} is not used)"
        for option in options
    )


def value_text(value: Any) -> str:
    """Format an option's value as in a recipe."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ", ".join(map(value_text, value)) if isinstance(value, list) else str(value)
