"""Print a report: findings first, then one batch, what a long run needs, and what was examined."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from forge.util import show
from forge_doctor.findings import Finding

if TYPE_CHECKING:
    from forge_doctor.report import DoctorReport

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def as_html(report: DoctorReport) -> str:
    """Return the page for a notebook, in its own colours of text and ground."""
    console = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False)
    print_page(report, console, hint="`report.good` names all of them.")
    style = "font-family:monospace;line-height:1.3"
    return console.export_html(code_format=f"<pre style='{style}'>{{code}}</pre>", inline_styles=True)


def print_page(
    report: DoctorReport, console: Console, every: bool = False, hint: str = "`--all` names all of them."
) -> None:
    """Findings first, then what was examined; `every`: name each check that found nothing, else `hint` says how."""
    if report.partial:
        text = f"This is a part of an examination: {report.partial}. What was left out is listed below.\n"
        console.print(Text(text, style="bold yellow"))
    for finding in report.findings:
        _print_finding(finding, console)
    if not report.findings:
        console.print(Text("Nothing was found.", style="bold green"))
    if report.silenced:
        names = ", ".join(sorted({finding.name for finding in report.silenced}))
        console.print(Text(f"Expected by the task, and so not counted: {names}."))
    _print_good(report, console, every)
    if not every:
        console.print(Text(hint, style="dim"))
    reasons: dict[str, list[str]] = {}
    for what, why in report.skipped.items():
        reasons.setdefault(why, []).append(what)
    for why, left_out in reasons.items():
        console.print(Text(f"Not examined, {why}: {', '.join(left_out)}", style="dim"))


def _print_good(report: DoctorReport, console: Console, every: bool) -> None:
    console.print(Text(f"\nFound good: {len(report.good)} checks in {report.seconds:.0f} s", style="bold"))
    if every:
        console.print(_indented(", ".join(report.good), console, "dim"), soft_wrap=True)


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
    """The text, with every line of it indented."""
    return Text(show.wrapped(textwrap.indent(text, "  "), console.width), style)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
