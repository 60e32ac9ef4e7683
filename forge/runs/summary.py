"""The result of a fit, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from rich.console import Group
from rich.table import Table
from rich.text import Text

from forge.runs import wording
from forge.runs.compare import metrics_of
from forge.runs.directions import metric_rank, told_once
from forge.runs.folder import RunFolder
from forge.runs.group import RunGroup
from forge.runs.spread import Spread
from forge.util.text import command, short_path


def summary(
    metrics: Mapping[str, float],
    best: Mapping[str, tuple[int, float]],
    lines: Mapping[str, str],
    best_since: int | None = None,
) -> Group:
    """Show last and best value of every metric, then lines by label. Bests before update `best_since` are unknown."""
    heading = "best" if best_since is None else f"best since {best_since}"
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    grid.add_column("metric", overflow="fold")
    for column in ("last", *([heading, "update"] if best else [])):
        grid.add_column(column, justify="right", no_wrap=True)
    for name in sorted(told_once(metrics), key=metric_rank):
        update, value = best.get(name, (None, None))
        style = "bold" if name.startswith(("val/", "test/")) else ""
        cells = [Text(wording.number(metrics[name]), style)]
        if best:
            cells += [
                Text("" if value is None else wording.number(value), style),
                Text("" if update is None else str(update)),
            ]
        grid.add_row(Text(name, style), *cells)
    return Group(grid, Text(), *(Text.assemble((f"{label:<12}", "dim"), text) for label, text in lines.items()))


def group_summary(group: RunGroup) -> Group:
    """Show every metric of a group of runs: mean, deviation and the worst run; then where the runs are."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    heads = ("metric", "mean ± std", "worst", "run", "n")
    for column in heads:
        grid.add_column(column, justify="left" if column in ("metric", "run") else "right", no_wrap=column != "metric")
    for row in group_rows(group):
        style = "bold" if row[0].startswith(("val/", "test/")) else ""
        grid.add_row(*(Text(cell, style if i < 2 else "") for i, cell in enumerate(row)))
    forge, folder = quote(command("forge")), quote(short_path(group.path))
    lines = {"runs": group.progress, "folder": short_path(group.path), "send": f"{forge} report {folder}"}
    return Group(grid, Text(), *(Text.assemble((f"{label:<12}", "dim"), text) for label, text in lines.items()))


def group_rows(group: RunGroup) -> list[list[str]]:
    """Return (metric, mean ± deviation, worst value, its run, number of runs) of every metric."""
    rows = []
    for name in metrics_of(group):
        value = group.final[name]
        if isinstance(value, Spread):
            run, worst = value.worst or ("", None)
            shown = "" if worst is None else wording.number(worst)
            rows.append([name, wording.number(value), shown, run, str(value.n)])
    return rows


def folder_lines(run_dir: Path) -> dict[str, str]:
    """Return the run folder, its checkpoints, and commands to inspect it, by label."""
    lines, folder, forge = {"run folder": short_path(run_dir)}, quote(short_path(run_dir)), quote(command("forge"))
    saved = [f"{c.name} ({', '.join(c.marks)})" if c.marks else c.name for c in RunFolder(run_dir).checkpoints]
    if saved:
        more = [f"{len(saved) - 3} more", *saved[-3:]] if len(saved) > 3 else saved
        lines["checkpoints"] = ", ".join(more)
    if (run_dir / "tensorboard").is_dir():
        lines["look"] = f"{quote(command('tensorboard'))} --logdir {folder}"
    lines["send"] = f"{forge} report {folder}"
    return lines
