"""Account for the time of a fit's updates: plugins, data wait, evaluation and timing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge_plugins.ledger.timers import Cell, Timers

WORK = frozenset(
    f"forge_{name}"
    for name in (
        "train_step",
        "micro_step",
        "prepare_batch",
        "forward",
        "backward",
        "optimizer_step",
        "evaluate",
        "export",
    )
)
"""Actions that are the work of a run: the time of an owner in them is not a cost."""
ONCE = frozenset(f"forge_{name}" for name in ("setup_env", "build_model", "build_loader", "build_optimizers", "start"))
"""Hooks of the build, called before the first update."""

Counts = tuple[int, int]
"""Calls and nanoseconds."""
NOTHING: Counts = (0, 0)


@dataclass(slots=True)
class LedgerMark:
    """All counters at one moment, in nanoseconds."""

    at: int
    updates: int
    waited: int
    evaluated: int
    cells: dict[Cell, Counts]
    in_evaluation: dict[Cell, Counts]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One implementation between two marks."""

    cell: Cell
    calls: int
    spent: float
    "Nanoseconds, without the cost of timing."
    worst: float
    in_evaluation: bool

    @property
    def is_cost(self) -> bool:
        """Whether it adds to the work, rather than doing the work as an owner."""
        return not (self.cell.role == "own" and self.cell.hook in WORK)


@dataclass(frozen=True, slots=True)
class Period:
    """The time between two marks, in nanoseconds."""

    updates: int
    own: float
    "The updates themselves: without data wait, without the work of evaluation, without the timers."
    waited: float
    evaluated: float
    timing: float
    entries: list[LedgerEntry]

    @property
    def costs(self) -> dict[str, float]:
        """The cost of each plugin, beside the work."""
        found: dict[str, float] = {}
        for entry in self.entries:
            if entry.is_cost:
                found[entry.cell.plugin] = found.get(entry.cell.plugin, 0.0) + entry.spent
        return found


@dataclass(slots=True)
class Account:
    """Counts one fit, without its first update, which is a warm-up."""

    timers: Timers
    updates: int = 0
    waited: int = 0
    evaluated: int = 0
    in_evaluation: dict[Cell, Counts] = field(default_factory=dict)
    first: LedgerMark | None = None
    "The end of the first update."

    def begin(self) -> None:
        """Start counting, after the first update."""
        for cell in self.timers.cells:
            if cell.hook not in ONCE:
                cell.worst = 0
        self.first = self.mark()

    def mark(self) -> LedgerMark:
        cells = {cell: (cell.calls, cell.spent) for cell in self.timers.cells}
        now = self.timers.clock()
        return LedgerMark(now, self.updates, self.waited, self.evaluated, cells, dict(self.in_evaluation))

    def update(self, data_wait: float) -> None:
        self.updates += 1
        self.waited += round(data_wait * 1e9)

    def evaluation(self, before: LedgerMark) -> None:
        """Count an evaluation that began at `before` and has ended."""
        self.evaluated += self.timers.clock() - before.at
        for cell in self.timers.cells:
            calls, spent = before.cells[cell]
            old = self.in_evaluation.get(cell, NOTHING)
            self.in_evaluation[cell] = (old[0] + cell.calls - calls, old[1] + cell.spent - spent)

    def between(self, start: LedgerMark, stop: LedgerMark) -> Period:
        """Split the time between two marks."""
        entries: list[LedgerEntry] = []
        timing, within = 0.0, 0.0
        for cell in self.timers.cells:
            everything = _difference(start.cells, stop.cells, cell)
            inside = _difference(start.in_evaluation, stop.in_evaluation, cell)
            price = self.timers.price(cell)
            # the time of an evaluation, with its timers, does not belong to the updates
            timing += price.timing(everything[0] - inside[0])
            within += inside[1]
            in_evaluation = everything if cell.hook == "forge_evaluate" else inside
            in_updates = (everything[0] - in_evaluation[0], everything[1] - in_evaluation[1])
            for (calls, spent), evaluating in ((in_updates, False), (in_evaluation, True)):
                if calls:
                    entries.append(
                        LedgerEntry(cell, calls, price.net(calls, spent), price.net(1, cell.worst), evaluating)
                    )
        waited, evaluated = stop.waited - start.waited, stop.evaluated - start.evaluated
        work = max(0.0, evaluated - within)
        own = max(0.0, stop.at - start.at - waited - work - timing)
        return Period(stop.updates - start.updates, own, waited, work, timing, entries)

    def once(self, end: LedgerMark | None) -> list[dict[str, Any]]:
        """Return the time spent before the first update and after the last one, which ended at `end`."""
        rows: list[dict[str, Any]] = []
        for cell in self.timers.cells:
            calls, spent, when = cell.calls, cell.spent, "start"
            if cell.hook not in ONCE:
                before = NOTHING if end is None else end.cells[cell]
                calls, spent, when = calls - before[0], spent - before[1], "end"
            if calls and (when == "start" or end is not None):
                ms = self.timers.net(cell, calls, spent) / 1e6
                rows.append({"plugin": cell.plugin, "hook": cell.hook, "when": when, "ms": ms})
        return sorted(rows, key=lambda row: -row["ms"])


def _difference(start: dict[Cell, Counts], stop: dict[Cell, Counts], cell: Cell) -> Counts:
    first, last = start.get(cell, NOTHING), stop.get(cell, NOTHING)
    return last[0] - first[0], last[1] - first[1]
