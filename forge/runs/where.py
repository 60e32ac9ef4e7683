"""Choose runs by tag, option and metric: `task.lr=0.1`, `val/loss<0.3`, `status!=finished`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from forge.errors import ForgeError, did_you_mean
from forge.runs.compare import results, settings
from forge.runs.folder import RunFolder
from forge.runs.wording import value_text

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


def chosen(runs: Sequence[RunFolder], tags: Sequence[str], conditions: Sequence[str]) -> list[RunFolder]:
    """Return the runs that have all tags, and for which all conditions hold; a run without the value is left out."""
    kept = [run for run in runs if set(tags) <= set(run.tags)]
    for text in conditions:
        parts = re.fullmatch(r"(.+?)(<=|>=|!=|==|=|<|>)(.*)", text)
        if parts is None:
            raise ForgeError(f"--where {text!r} is no condition: write NAME=VALUE, !=, <, <=, > or >=, in quotes.")
        name, sign, wanted = parts[1], parts[2].replace("==", "="), parts[3]
        values = {run.path: {**settings(run), **results(run)} for run in kept}
        known = {key for found in values.values() for key in found}
        if kept and name not in known:
            raise ForgeError(f"None of these {len(kept)} runs has {name!r}.{did_you_mean(name, known)}")
        kept = [run for run in kept if name in values[run.path] and holds(values[run.path][name], sign, wanted)]
    return kept


def holds(value: Any, sign: str, wanted: str) -> bool:
    """Compare as numbers, where both are; else as text, of which = and != alone make sense. Of the values of a group
    one is enough."""
    if isinstance(value, list) and not any(isinstance(part, (list, dict)) for part in value):
        return any(holds(part, sign, wanted) for part in value) or (sign == "=" and value_text(value) == wanted)
    try:
        number: Any = value
        return COMPARE[sign](float(number), float(wanted))
    except (TypeError, ValueError):
        same = value_text(value) == wanted or (value is None and wanted in ("null", "none"))
        return same if sign == "=" else not same if sign == "!=" else False
