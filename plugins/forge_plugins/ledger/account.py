"""Account for the time of a fit's updates: plugins, data wait, evaluation and timing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from forge_plugins.ledger.timers import Timers

WORK = frozenset(
    f"forge_{name}"
    for name in (
        *("train_step", "micro_step", "prepare_batch", "forward", "backward"),
        *("optimizer_step", "evaluate", "export"),
    )
)
"""Actions that are the work of a run: the time of an owner in them is not a cost."""
ONCE = frozenset(f"forge_{name}" for name in ("setup_env", "build_model", "build_loader", "build_optimizers", "start"))
"""Hooks of the build, called before the first update."""

Mark = Counter[Any]
"""All counters at one moment: the time, updates, and calls and nanoseconds by cell."""


@dataclass(slots=True)
class Account:
    """Counts one fit, without its first update, which is a warm-up. Times are in nanoseconds."""

    timers: Timers
    counts: Mark = field(default_factory=Counter)
    "Updates, time waited and evaluated, and what cells took in evaluations."
    first: Mark | None = None
    "The end of the first update."

    def begin(self) -> None:
        """Start counting, after the first update."""
        for cell in self.timers.cells:
            if cell.hook not in ONCE:
                cell.worst = 0
        self.first = self.mark()

    def mark(self) -> Mark:
        now = self.counts.copy()
        for cell in self.timers.cells:
            now["calls", cell], now["spent", cell] = cell.calls, cell.spent
        now["at"] = self.timers.clock()
        return now

    def update(self, data_wait: float) -> None:
        self.counts["updates"] += 1
        self.counts["waited"] += round(data_wait * 1e9)

    def evaluation(self, before: Mark) -> None:
        """Count an evaluation that began at `before` and has ended."""
        self.counts["evaluated"] += self.timers.clock() - before["at"]
        for cell in self.timers.cells:
            self.counts["calls", cell, "evaluating"] += cell.calls - before["calls", cell]
            self.counts["spent", cell, "evaluating"] += cell.spent - before["spent", cell]

    def between(self, start: Mark, stop: Mark) -> dict[str, Any]:
        """Return the average update between two marks, with a row per plugin and hook, most expensive first."""
        passed = Counter({key: count - start[key] for key, count in stop.items()})
        updates, timing, within = max(passed["updates"], 1), 0.0, 0.0
        rows: list[dict[str, Any]] = []
        for cell in self.timers.cells:
            price, calls, spent = self.timers.price(cell), passed["calls", cell], passed["spent", cell]
            inside = passed["calls", cell, "evaluating"], passed["spent", cell, "evaluating"]
            # the time of an evaluation, with its timers, does not belong to the updates
            timing += price.timing(calls - inside[0])
            within += inside[1]
            inside = (calls, spent) if cell.hook == "forge_evaluate" else inside
            for evaluating, count, took in ((False, calls - inside[0], spent - inside[1]), (True, *inside)):
                row = {
                    "plugin": cell.plugin,
                    "hook": cell.hook,
                    "role": cell.role,
                    "in_validation": evaluating,
                    "is_cost": not (cell.role == "own" and cell.hook in WORK),  # else it does the work as an owner
                    "calls_per_update": count / updates,
                    "us_per_update": price.net(count, took) / updates / 1e3,
                    "worst_us": price.net(1, cell.worst) / 1e3,
                }
                rows += [row] if count else []
        work = max(0.0, passed["evaluated"] - within)
        own = max(0.0, passed["at"] - passed["waited"] - work - timing) / updates / 1e3
        for row in rows:
            row["share"] = row["us_per_update"] / own if own else 0.0
        total = sum(row["us_per_update"] for row in rows if row["is_cost"])
        return {
            "updates": passed["updates"],
            "rows": sorted(rows, key=lambda row: -row["us_per_update"]),
            "update_us": own,
            "data_wait_us": passed["waited"] / updates / 1e3,
            "validation_us": work / updates / 1e3,
            "timers_us": timing / updates / 1e3,
            "total_us": total,
            "total_share": total / own if own else 0.0,
        }

    def once(self, end: Mark | None) -> list[dict[str, Any]]:
        """Return the time spent before the first update and after the last one, which ended at `end`."""
        rows: list[dict[str, Any]] = []
        for cell in self.timers.cells:
            at_start = cell.hook in ONCE
            before = Counter() if end is None or at_start else end
            calls, spent = cell.calls - before["calls", cell], cell.spent - before["spent", cell]
            if calls and (at_start or end is not None):
                ms = self.timers.price(cell).net(calls, spent) / 1e6
                rows.append(
                    {"plugin": cell.plugin, "hook": cell.hook, "when": "start" if at_start else "end", "ms": ms}
                )
        return sorted(rows, key=lambda row: -row["ms"])
