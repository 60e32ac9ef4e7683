"""`forge doctor`: examine a task, its data and its plan for mistakes that raise no error."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from forge.cli import target
from forge.util import show

if TYPE_CHECKING:
    from forge_doctor import DoctorReport
    from forge_doctor.findings import Finding

GROUP = "check"
EXAMPLES = """\
Works on copies for about a minute, and writes no run. Exits with 1 if there are errors.

examples:
  forge doctor quickstart
  forge doctor my_task.py:MyTask --recipe fast trainer.max_epochs=50
  forge doctor my_task.py:MyTask --quick --json
"""
JOINED = "\0"
"""In place of a space at which no line may end."""
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def parser() -> ArgumentParser:
    parser = show.new_parser("doctor", "Examine a task and its data for mistakes that raise no error.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="leave out the updates on one batch")
    parser.add_argument("--all", action="store_true", help="name every check that found nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def run(args: Namespace) -> int:
    from forge.rng import seed_all
    from forge_doctor.doctor import doctor

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
        print_page(report, show.console(), args.all)
    return 1 if report.errors else 0


def print_page(report: DoctorReport, console: Console, every: bool = False) -> None:
    """Findings first, then what was examined; `every`: name each check that found nothing."""
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
    _print_good(report, console, every)
    for what, why in report.skipped.items():
        console.print(Text(f"Not examined: {what} ({why})", style="dim"))


def _print_good(report: DoctorReport, console: Console, every: bool) -> None:
    """A line for each area: as many names as it holds, or all of them on several lines."""
    from forge_doctor.areas import by_area

    count = len(report.good)
    console.print(Text(f"\nFound good: {count} checks in {report.seconds:.0f} s", style="bold"))
    areas = by_area(report.good)
    indent = max(map(len, areas), default=0) + 4
    width = max(40, console.width - indent)
    for area, names in areas.items():
        lines = textwrap.wrap(", ".join(names), width) if every else [_shortened(names, width)]
        console.print(Text.assemble(f"  {area}".ljust(indent), (f"\n{' ' * indent}".join(lines), "dim")))
    if not every:
        console.print(Text("`--all` names all of them.", style="dim"))


def _shortened(names: list[str], width: int) -> str:
    """As many names as fit on a line, and the number of the others."""
    for shown in range(len(names), 1, -1):
        rest = len(names) - shown
        line = ", ".join(names[:shown]) + (f" and {rest} more" if rest else "")
        if len(line) <= width:
            return line
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _print_readiness(report: DoctorReport, console: Console) -> None:
    if report.readiness:
        console.print(Text("Ready for a long run?", style="bold"))
    for item in report.readiness:
        mark = ("yes", "green") if item.is_on else ("no", "yellow")
        console.print(Text.assemble("  ", mark, "  " if item.is_on else "   ", f"{item.what}: {item.evidence}"))


def _print_finding(finding: Finding, console: Console) -> None:
    head = Text.assemble((finding.level, STYLES[finding.level]), "  ", (finding.name, "bold"))
    console.print(head + Text(f"  {finding.where}" if finding.where else "", style="cyan"))
    console.print(_indented(finding.message, console), soft_wrap=True)
    if finding.evidence:
        evidence = ", ".join(f"{key} {_number(value)}" for key, value in finding.evidence.items())
        console.print(_indented(evidence, console, "dim"), soft_wrap=True)
    console.print(_indented(f"Cure: {finding.cure}", console, "green"), soft_wrap=True)
    console.print()


def _indented(text: str, console: Console, style: str = "") -> Text:
    """The text, with every line of it indented. What stands in backticks stays on one line, to be copied."""
    fill = functools.partial(textwrap.wrap, width=console.width - 2, break_long_words=False, break_on_hyphens=False)
    joined = re.sub(r"`[^`\n]+`", lambda code: code[0].replace(" ", JOINED), text)
    lines = [line.replace(JOINED, " ") for given in joined.splitlines() for line in fill(given) or [""]]
    return Text("\n".join(f"  {line}" for line in lines), style)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
