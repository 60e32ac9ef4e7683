"""Log messages about compilation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from forge.runs.wording import counted
from forge.util.patterns import MANY, listed
from forge_plugins.compile.compile_watch import CompileWatch, Recompile, why_disabled

MOST = 5
"""Number of breaks or reasons that a message lists."""


def summary(watch: CompileWatch, reported: tuple[int, int, int]) -> tuple[int, str]:
    """Return the level and text of a log line: totals, and details of what is new since `reported`."""
    graphs = "an unknown number of graphs" if watch.graphs is None else counted(watch.graphs, "graph")
    ops = f" of {counted(watch.ops, 'op')}" if watch.graphs else ""
    breaks = counted(len(watch.breaks), "break") if watch.breaks else "no breaks"
    again = counted(len(watch.recompiles), "recompile") if watch.recompiles else "no recompiles"
    details = [f"break at {place}: {reason}" for place, reason in list(watch.breaks.items())[reported[1] :]]
    level = logging.WARNING if details else logging.INFO
    new = watch.recompiles[reported[2] :]
    details += dict.fromkeys(f"{again.function} was compiled again: {_why(again)}" for again in new)
    took = f", in {watch.seconds:.1f} s" if watch.seconds else ""
    return level, f"compile: {graphs}{ops}, {breaks}, {again}{took}.{_lines(details)}"


def limit(given_up: Sequence[Recompile], dynamic: bool | None) -> str:
    """Return the warning for a function that torch gave up on."""
    last = given_up[-1]
    return (
        f"compile: {last.function} was compiled for so many kinds of inputs that torch gave up (torch._dynamo.config."
        f"recompile_limit): new ones run eagerly from now on. A resumed run would compile them again, and so end in "
        f"other bits than an uninterrupted one. The last reason: {last.reason}. {_advice(last, dynamic)}"
    )


def nothing(watch: CompileWatch) -> str:
    """Return the warning for a run without a graph."""
    if disabled := why_disabled():
        why = disabled
    elif watch.breaks:
        places = [f"at {place}: {reason}" for place, reason in watch.breaks.items()]
        why = f"Every graph broke off before its first operation:{_lines(places)}"
    else:
        why = "torch skipped every function that it was given, or found no tensor operation in them."
    return f"compile: nothing was compiled; training is eager, and not faster. {why}"


def without(names: Sequence[str]) -> str:
    """Return the warning for blocks without a graph."""
    return (
        f"compile: nothing was compiled in {listed(names, MANY)}: never called, or torch skipped, or broke off in, all "
        "of it."
    )


def _why(again: Recompile) -> str:
    if again.short_batch is None:
        return again.reason
    now, first = again.short_batch
    return f"a batch of {now} instead of {first}. Normal for the last one of an epoch; drop_last=True avoids it"


def _advice(last: Recompile, dynamic: bool | None) -> str:
    if last.about_shapes and dynamic is not True:
        return "Pad batches to one shape, drop the last short one (drop_last=True), or set compile.dynamic=true."
    if last.about_shapes:
        return "Pad batches to one shape, or to a few."
    if "==" in last.condition:
        return (
            "A Python number that changes from step to step became part of the graph: keep it in a tensor, and do not "
            "read one with .item() in a step."
        )
    return 'TORCH_LOGS="recompiles" shows all reasons.'


def _lines(items: Iterable[str]) -> str:
    """Return items as lines under a message, at most MOST."""
    items = list(items)
    more = [f"and {len(items) - MOST} more"] if len(items) > MOST else []
    return "".join(f"\n  {item}" for item in [*items[:MOST], *more])
