"""What hooks took, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.util.tables import aligned

COLUMNS = ("plugin", "hook", "calls", "µs/update", "share", "worst µs")


def as_text(report: Mapping[str, Any]) -> str:
    """Return a report as text: an update, its phases, what each plugin costs in it, and the lines that make the host
    wait for its device."""
    if not report["updates"]:
        return "the run ended before its second update; the first one is a warm-up and is not counted."
    lines = [
        f"{report['updates']} updates of {report['update_us']:,.0f} µs on average; "
        f"plugins take {report['total_us']:,.1f} µs of each, {report['total_share']:.1%}"
    ]
    lines.append(f"  {', '.join(f'{name} {us:,.0f} µs' for name, us in report['phases_us'].items() if us >= 0.5)}")
    costs = [row for row in report["rows"] if row["is_cost"]]
    lines += _table(costs)
    if work := [row for row in report["rows"] if not row["is_cost"]]:
        lines += ["  done in core's place, the work itself included:", *_table(work)]
    if syncs := report.get("syncs"):
        lines.append("the host waits for the device in updates:")
        lines += [
            f"  {row['who']}, {row['file']}:{row['line']}: {row['code']} ({row['per_update']:.2g} per update)"
            for row in syncs
        ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        (
            row["plugin"],
            _label(row),
            f"{row['calls_per_update']:.3g}",
            f"{row['us_per_update']:,.1f}",
            f"{row['share']:.1%}",
            f"{row['worst_us']:,.0f}",
        )
        for row in rows
    ]
    return [f"  {line}" for line in aligned([COLUMNS, *cells], texts=2)] if cells else []


def _label(row: Mapping[str, Any]) -> str:
    return row["hook"].removeprefix("forge_") + (" (validation)" if row.get("in_validation") else "")
