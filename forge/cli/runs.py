"""`forge runs`: list runs with their results, or show what differs between some."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from forge.cli.runs_spans import spans_of
from forge.errors import ForgeError, did_you_mean
from forge.runs import compare, wording
from forge.runs.directions import mode_of, told_once
from forge.runs.find import RUNS, label, locate, rows_in
from forge.runs.folder import RunFolder, is_group
from forge.runs.group import RunGroup
from forge.runs.spread import Spread
from forge.runs.summary import group_summary
from forge.spans import goodput
from forge.util import show

EXAMPLES = """\
RUN is a run folder, a folder of runs (its newest), or a unique part of a run's name. Runs of one command (--seeds,
--folds) are one row: mean ± standard deviation of those that are finished.

examples:
  forge runs                                      every run under runs/, newest first
  forge runs --all                                the single runs of groups too
  forge runs runs/quickstart/GROUP                one group: mean, deviation, the worst, and its runs
  forge runs runs/quickstart --sort val/accuracy  the runs of one recipe, the best first
  forge runs compare RUN_A RUN_B                  differences in recipe, result and environment
  forge runs spans RUN                            where its time went, the cost of each plugin, and what limits it
  forge runs spans RUN --perfetto trace.json      its spans as a picture, all ranks in one
  forge runs --json | jq '.[] | select(.options["task.lr"] == 0.1) | .path'
"""
STYLES = {"running": "cyan", "finished": "green", "interrupted": "yellow", "failed": "red", "killed": "red"}
SHORTER = "shorter"
DISPENSABLE = ("goodput", "resume", "recipe", "task", "duration", "started", SHORTER, "updates")
"""Columns dropped on a narrow terminal, in this order; at `SHORTER` runs lose the name of their group."""
MOST_METRICS = 6


def parser() -> ArgumentParser:
    parser = show.new_parser("runs", "List runs with their results, or compare some.", EXAMPLES)
    parser.add_argument(
        "words",
        metavar="FOLDER | compare RUN RUN ... | spans RUN",
        nargs="*",
        help=f"folder to list (default: {RUNS})",
    )
    parser.add_argument("--all", action="store_true", help="list the single runs of groups too")
    parser.add_argument("--sort", metavar="METRIC", help="list the best value first, as in --sort val/accuracy")
    parser.add_argument("--perfetto", metavar="FILE", help="with spans: write a trace for https://ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    return parser


def run(args: Namespace) -> int:
    match args.words:
        case ["compare", *_] if args.sort or args.all:
            raise ForgeError("--sort and --all are for the list of runs, not for forge runs compare.")
        case ["compare", one, other, *more]:
            return _compare([locate(name) for name in (one, other, *more)], args.json)
        case ["compare", *_]:
            raise ForgeError("forge runs compare takes two runs or more. Write: forge runs compare RUN RUN")
        case ["spans", name]:
            return spans_of(locate(name), args.perfetto, args.json)
        case ["spans", *_]:
            raise ForgeError("Write: forge runs spans RUN")
        case [] | [_]:
            return _list(args.words[0] if args.words else RUNS, args)
        case several:
            raise ForgeError(
                f"forge runs lists one folder, and got {', '.join(several)}. To compare: forge runs compare"
            )


# -- the list ---------------------------------------------------------------------------------------------------------


def _list(folder: str, args: Namespace) -> int:
    if not Path(folder).is_dir() and folder != RUNS:
        known = [str(path) for path in Path(RUNS).glob("*") if path.is_dir()]
        raise ForgeError(f"No folder {folder!r}.{did_you_mean(folder, known)}")
    runs = rows_in(folder)
    if args.sort:
        runs = _sorted(runs, args.sort)
    if args.json:
        print(json.dumps([run_as_json(run) for run in runs], indent=2, allow_nan=False))
        return 0
    if not runs:
        show.message(f"No runs in {folder} yet: train with forge fit quickstart.", "dim")
        return 0
    console = show.console()
    if is_group(Path(folder)) and isinstance(runs[0], RunGroup):
        console.print(group_summary(runs[0]), soft_wrap=True)
        console.print()
        runs = runs[0].runs
    elif args.all:
        runs = [run for row in runs for run in (row, *(row.runs if isinstance(row, RunGroup) else ()))]
    console.print(_table(runs, args.sort, console))
    if console.is_terminal:
        console.print(
            "\nforge runs compare RUN RUN shows the differences; forge report RUN writes a page.", style="dim"
        )
    return 0


def _sorted(runs: Sequence[RunFolder], metric: str) -> list[RunFolder]:
    known = {name for run in runs for name in run.final}
    if metric not in known:
        raise ForgeError(f"None of these {len(runs)} runs has a metric {metric!r}.{did_you_mean(metric, known)}")
    sign = 1 if mode_of(metric) == "min" else -1

    def rank(run: RunFolder) -> tuple[bool, float]:
        value = run.final.get(metric, math.nan)
        return not math.isfinite(value), sign * value if math.isfinite(value) else 0.0

    return sorted(runs, key=rank)


def _table(runs: Sequence[RunFolder], metric: str | None, console: Console) -> Table:
    """Build a table with as many columns as fit; the run, its status and its metrics always stay."""
    counts = Counter(name for run in runs for name in run.final if name.startswith(("val/", "test/")))
    metrics = [name for name, _ in counts.most_common(MOST_METRICS)]
    if metric and metric not in metrics:
        metrics.insert(0, metric)
    spent = {run.path: found for run in runs if (found := goodput.spent(run.spans)) is not None}
    columns: dict[str, Callable[[RunFolder], str | Text]] = {
        "run": label,
        "recipe": lambda run: run.recipe,
        "task": lambda run: run.task,
        "status": lambda run: Text(
            run.progress if isinstance(run, RunGroup) else run.status, STYLES.get(run.status, "")
        ),
        "updates": _updates,
        "started": lambda run: wording.short_moment(run.started),
        "duration": lambda run: wording.duration(run.seconds),
        **({"goodput": lambda run: f"{spent[run.path].share:.0%}" if run.path in spent else ""} if spent else {}),
        **({"resume": lambda run: (run.resume or "").partition(":")[0]} if any(run.resume for run in runs) else {}),
        **{
            name: lambda run, name=name: wording.number(run.final[name]) if name in run.final else ""
            for name in metrics
        },
    }
    watched = {run.best.monitor for run in runs if run.best}
    best = f"best {' or '.join(sorted(watched))}" if watched else ""
    if best:
        columns[best] = _best
    dispensable = [*DISPENSABLE, *(name for name in reversed(metrics[1:]) if name != metric), best]
    if any(run.subject != run.recipe for run in runs):  # the task is more informative than a stack recipe
        dispensable.insert(dispensable.index(SHORTER), dispensable.pop(dispensable.index("task")))
    while True:
        grid = _filled(runs, columns)
        needed = Measurement.get(console, console.options.update(max_width=10_000), grid).maximum
        if needed <= console.width or not dispensable:
            return grid
        first = dispensable.pop(0)
        if first == SHORTER:
            columns["run"] = lambda run: run.path.name
        columns.pop(first, None)


def _filled(runs: Sequence[RunFolder], columns: dict[str, Callable[[RunFolder], str | Text]]) -> Table:
    grid = show.table(*columns)
    for column in grid.columns:
        if "/" in str(column.header) or column.header in ("updates", "duration", "goodput"):
            column.justify = "right"
    for run in runs:
        cells = (cell(run) for cell in columns.values())
        grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return grid


def _updates(run: RunFolder) -> str:
    return f"{run.updates}/{run.planned}" if run.planned and run.planned != run.updates else str(run.updates)


def _best(run: RunFolder) -> str:
    best = run.best
    return "" if best is None else f"{wording.number(best.value)} at {best.update}"


def run_as_json(run: RunFolder) -> dict[str, Any]:
    spent = goodput.spent(run.spans)
    found = {
        "path": str(run.path),
        "name": run.name,
        "recipe": run.recipe or None,
        "task": run.task or None,
        "status": run.status,
        "reason": run.reason or None,
        "updates": run.updates,
        "planned_updates": run.planned,
        "epochs": run.epochs,
        "started": run.card.get("started"),
        "seconds": round(run.seconds, 3),
        "goodput": None if spent is None else spent.as_json(),
        "metrics": {name: _number(value) for name, value in run.final.items()},
        "best": vars(run.best) if run.best else None,
        "resume": run.resume,
        "options": compare.settings(run),
    }
    if not isinstance(run, RunGroup):
        return found
    spreads = {name: value for name, value in run.final.items() if isinstance(value, Spread)}
    over_runs = {name: _spread_as_json(value) for name, value in spreads.items()}
    return {**found, "spread": over_runs, "runs": [run_as_json(each) for each in run.runs]}


def _spread_as_json(value: Spread) -> dict[str, Any]:
    worst = None if value.worst is None else {"run": value.worst[0], "value": _number(value.worst[1])}
    return {"std": _number(value.std), "n": value.n, "worst": worst}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


# -- compare ----------------------------------------------------------------------------------------------------------


def _compare(runs: Sequence[RunFolder], as_json: bool) -> int:
    parts = compare.compare(runs)
    if as_json:
        content = {"runs": [str(run.path) for run in runs], **{name: _finite(rows) for name, rows in parts.items()}}
        print(json.dumps(content, indent=2, allow_nan=False))
        return 0
    console = show.console()
    names = [ascii_uppercase[i] if i < 26 else str(i + 1) for i in range(len(runs))]
    for name, run in zip(names, runs, strict=True):
        console.print(
            Text.assemble(
                (f"{name}  ", "bold"), str(show.near(run.path)), (f"  {run.status}", STYLES.get(run.status, ""))
            ),
            soft_wrap=True,
        )
    for part, rows in parts.items():
        console.print()
        console.print(_side_by_side(part, rows, names) if rows else Text(f"{part}: no difference", "dim"))
    return 0


def _side_by_side(part: str, rows: compare.Rows, names: Sequence[str]) -> Table:
    is_result = part == "result"
    two = is_result and len(names) == 2
    grid = show.table(part, *names, *["difference"] * two, wrap=names)
    for column in grid.columns[1:]:
        column.justify = "right" if is_result else "left"
    as_text = wording.number if is_result else wording.value_text
    for key, values in told_once(rows).items():
        cells = [Text("–" if value is None else as_text(value)) for value in values]
        change = compare.difference(values) if two else None
        more = [Text(wording.signed(change), _color(key, change)) if change else Text("")] if two else []
        grid.add_row(Text(key), *cells, *more)
    return grid


def _color(key: str, change: float) -> str:
    mode = mode_of(key)
    return "" if mode is None else "green" if (change < 0) == (mode == "min") else "red"


def _finite(rows: compare.Rows) -> compare.Rows:
    return {
        key: [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]
        for key, values in rows.items()
    }
