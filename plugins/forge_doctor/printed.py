"""Print a report: findings first, then one batch, what a long run needs, and what was examined."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forge.util import show
from forge_doctor.areas import by_area
from forge_doctor.findings import Finding

if TYPE_CHECKING:
    from forge_doctor.report import Curve, DoctorReport

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 50
"""Columns of a curve."""
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
    for sample in report.worst:
        text = f"sample {sample['sample']} of the first batch has a loss of {sample['loss']:.4g}, the median is "
        console.print(Text(f"{text}{sample['median']:.4g}:", style="bold"))
        console.print(Text(f"{sample['shown']}\n", style="dim"))
    if report.one_batch is not None:
        _print_curve(report.one_batch, console)
    _print_readiness(report, console)
    _print_good(report, console, every)
    if not every:
        console.print(Text(hint, style="dim"))
    reasons: dict[str, list[str]] = {}
    for what, why in report.skipped.items():
        reasons.setdefault(why, []).append(what)
    for why, left_out in reasons.items():
        console.print(Text(f"Not examined, {why}: {', '.join(left_out)}", style="dim"))


def _print_curve(curve: Curve, console: Console) -> None:
    """The losses of one batch as a row of bars, from the lowest to the highest; `chance` marks that level."""
    console.print(Text("One batch, trained on again and again", style="bold"))
    bars = drawn(curve.losses, curve.floor)
    console.print(Text.assemble("  ", (bars, "cyan"), f"  {curve.start:.4g} to {curve.reached:.4g}"))
    if curve.chance is not None:
        bar = drawn([curve.start, curve.chance, *curve.losses], curve.floor, width=None)[1]
        console.print(Text.assemble("  ", (bar * len(bars), "dim"), f"  chance, {curve.chance:.4g}"))
    console.print(_indented(curve.verdict, console), soft_wrap=True)
    console.print()


def drawn(losses: list[float], floor: float | None, width: int | None = WIDTH) -> str:
    """Losses as bars of eight heights; of many, the mean of each part."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return ""
    low = min(finite) if floor is None else min(floor, *finite)
    high = max(finite)
    count = min(width or len(finite), len(finite))
    edges = [round(i * len(finite) / count) for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(BARS[round((mean - low) / max(high - low, 1e-12) * (len(BARS) - 1))] for mean in means)


def _print_good(report: DoctorReport, console: Console, every: bool) -> None:
    """A line for each area: as many names as it holds, or all of them on several lines."""
    count = len(report.good)
    console.print(Text(f"\nFound good: {count} checks in {report.seconds:.0f} s", style="bold"))
    areas = by_area(report.good)
    indent = max(map(len, areas), default=0) + 4
    width = max(40, console.width - indent)
    for area, names in areas.items():
        lines = textwrap.wrap(", ".join(names), width) if every else [_shortened(names, width)]
        console.print(Text.assemble(f"  {area}".ljust(indent), (f"\n{' ' * indent}".join(lines), "dim")))


def _shortened(names: list[str], width: int) -> str:
    """As many names as fit on a line, and the number of the others."""
    for shown in range(len(names), 1, -1):
        rest = len(names) - shown
        line = ", ".join(names[:shown]) + (f" and {rest} more" if rest else "")
        if len(line) <= width:
            return line
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _print_readiness(report: DoctorReport, console: Console) -> None:
    if not report.readiness:
        return
    console.print(Text("Ready for a long run?", style="bold"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for item in report.readiness:
        grid.add_row(
            Text("yes", "green") if item.is_on else Text("no", "yellow"), Text(f"{item.what}: {item.evidence}")
        )
    console.print(Padding.indent(grid, 2))


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
