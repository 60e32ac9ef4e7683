"""`forge doctor`: examine a task, its data and its plan for mistakes that raise no error."""

from __future__ import annotations

import json
import signal
import time
from argparse import ArgumentParser, Namespace

from rich.text import Text

from forge.cli import target
from forge.errors import ForgeError
from forge.util import show

GROUP = "check"
AFTER = "plan"
EXAMPLES = """\
Works on copies for two minutes at most, and writes no run. Exits with 1 if there are errors. When the time is over, or
by Ctrl-C, it prints what it has, and lists what was left out.

examples:
  forge doctor quickstart
  forge doctor my_task.py:MyTask --recipe fast trainer.max_epochs=50
  forge doctor my_task.py:MyTask --quick --json
  forge doctor my_task.py:MyTask --budget 10
  forge doctor my_task.py:MyTask --recipe fast --ready     # before a long run: plan, smoke, doctor, resume, determinism
"""
STYLES = {"good": "green", "note": "cyan", "warning": "bold yellow", "error": "bold red"}
MINUTES, QUICK = 2.0, 20
"""Minutes of an examination, and seconds of CPU of a quick one."""
PLANNED = 0.9
"""The share of a quick one's time that is planned: what has begun is finished."""


def parser() -> ArgumentParser:
    parser = show.new_parser("doctor", "Examine a task and its data for mistakes that raise no error.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument(
        "--budget", type=float, default=MINUTES, metavar="MINUTES", help=f"time to take at most (default: {MINUTES:g})"
    )
    parser.add_argument("--quick", action="store_true", help=f"take {QUICK} s of CPU at most")
    parser.add_argument(
        "--ready",
        action="store_true",
        help="say whether a long run may begin: what exists is run, and told in one table",
    )
    parser.add_argument("--all", action="store_true", help="name every check that found nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def run(args: Namespace) -> int:
    from forge.rng import seed_all
    from forge_doctor.deadline import Deadline
    from forge_doctor.doctor import doctor
    from forge_doctor.printed import print_page
    from forge_doctor.report import DoctorReport
    from forge_doctor.signals import ended_by_signals

    if args.budget <= 0:
        raise ForgeError(f"--budget is {args.budget:g}. Write minutes above 0, as --budget 0.5.")
    if args.ready:
        return ready(args)
    recipe = target.load(args, to_train=True)
    seed_all(recipe.trainer.get("seed") or 0)
    task = recipe.make_task()
    data = recipe.make_data(task)
    deadline = Deadline(PLANNED * QUICK, time.process_time) if args.quick else Deadline(60 * args.budget)
    report, code = DoctorReport(), 0
    with show.console(stderr=True).status("") as status, ended_by_signals():
        try:
            doctor(
                task,
                data.train,
                data.val,
                recipe=recipe,
                tell=lambda what: status.update(f"examining, {_clock(deadline.left)} left: {what}"),
                deadline=deadline,
                report=report,
            )
        except KeyboardInterrupt:
            report.partial, code = "it was interrupted", 130
        except SystemExit as leaving:
            if not isinstance(leaving.code, int) or leaving.code <= 128:
                raise
            report.partial, code = f"{signal.Signals(leaving.code - 128).name} ended it", leaving.code
    if args.json:
        print(json.dumps(report.as_data(), default=str))
    else:
        print_page(report, show.console(), args.all)
    return code or (1 if report.errors else 0)


def ready(args: Namespace) -> int:
    """Print the table of what a long run needs; its exit code says whether it may begin."""
    from forge_doctor.ready import Check, as_data, checks, may_start

    found: list[Check] = []
    with show.console(stderr=True).status("") as status:
        for check in checks(target.same_target(args), lambda what: status.update(f"trying: {what}")):
            found.append(check)
    if args.json:
        print(json.dumps(as_data(found)))
        return 0 if may_start(found) else 1
    console, table = show.console(), show.table("", "", "evidence", "to look again", wrap=("evidence", "to look again"))
    for check in found:
        table.add_row(check.what, Text(check.result, STYLES[check.result]), check.evidence, check.again)
    console.print(table)
    answer = "Yes." if may_start(found) else "No: mend what is an error first."
    console.print(Text(f"\nMay the long run begin? {answer}", "bold"))
    return 0 if may_start(found) else 1


def _clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02d}"
