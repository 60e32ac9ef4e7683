"""`forge doctor`: examine a task, its data and its plan for mistakes that raise no error."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from forge.cli import target
from forge.util import show

if TYPE_CHECKING:
    from forge.diagnose.findings import Finding
    from forge.examine import DoctorReport

EXAMPLES = """\
Works on copies for about a minute, and writes no run. Exits with 1 if there are errors.

examples:
  forge doctor quickstart
  forge doctor my_task.py:MyTask --recipe fast trainer.max_epochs=50
  forge doctor my_task.py:MyTask --quick --json
"""
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def parser() -> ArgumentParser:
    parser = show.new_parser("doctor", "Examine a task and its data for mistakes that raise no error.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="leave out the updates on one batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def run(args: Namespace) -> int:
    from forge.examine import doctor
    from forge.rng import seed_all

    recipe = target.load(args, to_train=True)
    seed_all(recipe.trainer.get("seed") or 0)
    task, data = recipe.make_task(), recipe.make_data()
    console = show.console(stderr=True)
    with console.status("") as status:
        report = doctor(
            task,
            data.train,
            data.val,
            recipe=recipe,
            budget=0 if args.quick else None,
            tell=lambda what: status.update(f"examining: {what}"),
            rebuild=lambda: recipe.make_data().train,
        )
    if args.json:
        print(json.dumps(report.as_data(), default=str))
    else:
        print_page(report, show.console())
    return 1 if report.errors else 0


def print_page(report: DoctorReport, console: Console) -> None:
    """Findings first, then what was examined."""
    for finding in report.findings:
        _print_finding(finding, console)
    if not report.findings:
        console.print(Text("Nothing was found.", style="bold green"))
    if report.silenced:
        names = ", ".join(sorted({finding.name for finding in report.silenced}))
        console.print(Text(f"Expected by the task, and so not counted: {names}."))
    for sample in report.worst:
        text = f"sample {sample['sample']} of the first batch has a loss of {sample['loss']:.4g}, the median is "
        console.print(Text(f"{text}{sample['median']:.4g}:", style="bold"))
        console.print(Text(f"{sample['shown']}\n", style="dim"))
    _print_readiness(report, console)
    console.print(Text(f"\nExamined in {report.seconds:.0f} s and found good: {', '.join(report.good)}.", style="dim"))
    for what, why in report.skipped.items():
        console.print(Text(f"Not examined: {what} ({why})", style="dim"))


def _print_readiness(report: DoctorReport, console: Console) -> None:
    if report.readiness:
        console.print(Text("Ready for a long run?", style="bold"))
    for item in report.readiness:
        mark = ("yes", "green") if item.is_on else ("no", "yellow")
        console.print(Text.assemble("  ", mark, "  " if item.is_on else "   ", f"{item.what}: {item.evidence}"))


def _print_finding(finding: Finding, console: Console) -> None:
    head = Text.assemble((finding.level, STYLES[finding.level]), "  ", (finding.name, "bold"))
    console.print(head + Text(f"  {finding.where}" if finding.where else "", style="cyan"))
    console.print(Text(f"  {finding.message}"))
    if finding.evidence:
        console.print(
            Text("  " + ", ".join(f"{key} {_number(value)}" for key, value in finding.evidence.items()), "dim")
        )
    console.print(Text(f"  Cure: {finding.cure}", style="green"))
    console.print()


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
