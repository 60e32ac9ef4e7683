"""The ledger's report at the end of a fit, as plain data and as text."""

from __future__ import annotations

from typing import Any

from forge.util.tables import aligned

Report = dict[str, Any]
COLUMNS = ("plugin", "hook", "calls", "µs/update", "share", "worst µs")


def as_text(report: Report) -> str:
    """Return the report as text for the log."""
    if not report["updates"]:
        return "the run ended before its second update; the first one is a warm-up and is not counted."
    lines = [headline(report)]
    costs = [row for row in report["rows"] if row["is_cost"]]
    work = [row for row in report["rows"] if not row["is_cost"]]
    lines += _table(costs) if costs else []
    if work:
        lines += ["  done in core's place, the work itself included:", *_table(work)]
    once = [f"{row['plugin']} {_label(row['hook'])} {row['ms']:.1f} ms" for row in report["once"] if row["ms"] >= 0.05]
    if once:
        lines.append(f"  once: {', '.join(once)}")
    if "syncs" in report:
        lines += [f"  {line}" for line in sync_lines(report)]
    return "\n".join(lines)


def headline(report: Report) -> str:
    """Return the time of an update, and the share of plugins."""
    beside = [
        f"{report[key]:,.0f} µs {what}"
        for key, what in (("data_wait_us", "waiting for data"), ("validation_us", "of validation"))
        if report[key] >= 0.5
    ]
    apart = f" (apart: {' and '.join(beside)} per update)" if beside else ""
    return (
        f"{report['updates']} updates of {report['update_us']:,.0f} µs on average, logs and saves included{apart}; "
        f"plugins take {report['total_us']:,.1f} µs of each, {report['total_share']:.1%}"
    )


def sync_lines(report: Report) -> list[str]:
    """Return the findings of the sync audit, one line each."""
    found = [sync for sync in report["syncs"] if not sync["expected"]]
    expected = [sync for sync in report["syncs"] if sync["expected"]]
    lines = [f"host syncs: {report['syncs_per_update']:.2g} per update{':' if found else ''}"]
    lines += [f"  {sync_text(sync)}" for sync in found]
    if expected:
        kinds = sorted({sync["expected"] for sync in expected})
        count = sum(sync["count"] for sync in expected)
        lines.append(f"  expected, and not counted: {count} while {' or '.join(kinds)}")
    return lines


def sync_text(sync: dict[str, Any]) -> str:
    """Return one place that made the host wait, as text."""
    return f"{sync['who']}, {sync['file']}:{sync['line']}: {sync['code']} ({sync['per_update']:.2g} per update)"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    cells: list[tuple[str, ...]] = [COLUMNS]
    for row in rows:
        hook = _label(row["hook"]) + (" (validation)" if row["in_validation"] else "")
        numbers = f"{row['calls_per_update']:.3g}", f"{row['us_per_update']:,.1f}", f"{row['share']:.1%}"
        cells.append((row["plugin"], hook, *numbers, f"{row['worst_us']:,.0f}"))
    return [f"  {line}" for line in aligned(cells, texts=2)]


def _label(hook: str) -> str:
    return hook.removeprefix("forge_")
