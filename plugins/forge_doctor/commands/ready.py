"""`forge ready`: walk the road before a long run, step by step, and say whether it may begin."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forge.cli import target
from forge.runs.wording import duration
from forge.util import show

if TYPE_CHECKING:
    from forge_doctor.ready.report import RoadStep

GROUP = "check"
EXAMPLES = """\
Looks at the data, asks the doctor, learns one batch, runs every stage, saves, loads and resumes, compares precisions
and devices, and lists what the stack lacks; on copies, in a scratch folder. Writes ready.md and ready.html.
Exit code 0: the long run may start; 1: it should not.

examples:
  forge ready quickstart
  forge ready my_task.py:MyTask --recipe fast trainer.max_epochs=50
  forge ready my_task.py:MyTask --budget 30 --price 2.50 --json
"""
STYLES = {"good": "green", "note": "cyan", "warning": "bold yellow", "error": "bold red", "left out": "dim"}


def parser() -> ArgumentParser:
    parser = show.new_parser("ready", "Walk the road before a long run, and say whether it may begin.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument(
        "--budget", type=float, default=10.0, metavar="MINUTES", help="time for all steps (default: 10)"
    )
    parser.add_argument("--price", type=float, metavar="PER_HOUR", help="the price of an hour of the device")
    parser.add_argument("--keep-going", action="store_true", help="go on after a step that found an error")
    parser.add_argument("--out", metavar="DIR", help="the folder of ready.md (default: runs/ready/NAME)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def run(args: Namespace) -> int:
    if args.overrides and "=" not in args.overrides[0] and args.recipe is None:
        args.recipe = args.overrides.pop(0)  # forge ready TASK RECIPE

    from forge.rng import seed_all
    from forge_doctor.ready.road import walk

    recipe = target.load(args, to_train=True)
    seed = recipe.trainer.get("seed") or 0
    seed_all(seed)
    task = recipe.make_task()
    data = recipe.make_data(task)
    console, loud = show.console(), not args.json
    status = show.console(stderr=True).status("")

    def tell(step: RoadStep, is_done: bool) -> None:
        status.update(f"{step.number} {step.title}")
        if is_done and loud:
            status.stop()  # or its line stays, before the step's first
            _print(step)
            status.start()

    lacks = [] if "checkpoint" in recipe.plugins else ["checkpoint"]
    same = target.same_target(args, {"trainer.seed": seed}, plugins=[*args.plugins, *lacks])
    with status:
        report = walk(
            task,
            {split: getattr(data, split) for split in ("train", "val", "test", "predict")},
            None,
            {"recipe": recipe},
            budget=args.budget,
            keep_going=args.keep_going,
            out=args.out,
            tell=tell,
            price=args.price,
            again=[sys.executable, "-m", "forge", "verify-resume", *same, "--rehearse"],
            remake=lambda: (recipe.make_task(), recipe.make_data().train),
        )
    if args.json:
        print(json.dumps(report.as_data(), default=str))
    else:
        for why, steps in report.why_left_out.items():
            console.print(Text(f"Left out: {', '.join(steps)}. {why}", "dim"))
        console.print(Text(f"\nMay I start the long run? {report.answer}", "bold"))
        console.print(Text(f"{report.folder}/ready.md and ready.html have all of it.", "dim"), soft_wrap=True)
    if report.interrupted:
        return 128 + report.interrupted
    return 0 if report.may_start else 1


def _print(step: RoadStep) -> None:
    console, remarks = show.console(), Table.grid(padding=(0, 1, 0, 0))
    time = f"  {duration(step.seconds)}"
    console.print(Text.assemble((f"{step.number:2} {step.title}  ", "bold"), (step.result, STYLES[step.result]), time))
    if step.left_out:
        console.print(Padding.indent(Text(step.left_out, "dim"), 3))
    for remark in step.remarks:
        words = Text(f"{remark.what}: {remark.evidence}")
        if remark.level != "good":
            words.append(f"\n{remark.risk}", "dim")
        remarks.add_row(Text(remark.level, STYLES[remark.level]), words)
    console.print(Padding.indent(remarks, 3))
    for grid in step.grids:
        table = show.table(*grid.heads, wrap=grid.heads[:1])
        for row in grid.rows:
            table.add_row(*row)
        console.print(Padding.indent(table, 3))
