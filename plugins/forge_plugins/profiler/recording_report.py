"""The report of a recording: tables as text for the log, as Markdown for TensorBoard and a file, and as plain data."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

import forge
from forge.util.tables import Rows, aligned, piped
from forge.util.text import duration, format_bytes, short_path
from forge_plugins.profiler.communication import collectives
from forge_plugins.profiler.memory import SNAPSHOT, at_peak
from forge_plugins.torch_internals import dump_memory_snapshot

logger = logging.getLogger("forge")

Row = dict[str, Any]
"""A name, and numbers of an average update: calls, seconds, bytes."""
COLUMNS: dict[str, Callable[[Any], str]] = {
    "calls": "{:.4g}".format,
    **dict.fromkeys(("host", "device", "time", "exposed", "overlapped"), duration),
    "bytes": format_bytes,
    "share": "{:.1%}".format,
}
"""How numbers are shown."""
LONGEST = 60
TRACE = "Trace, for https://ui.perfetto.dev (nothing is uploaded)"
LOG_LEVEL = "KINETO_LOG_LEVEL"


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one recording."""

    device: str
    first: int
    "The first recorded update."
    updates: int
    tables: dict[str, list[Row]]
    "What an average update consists of; rows in the order of what matters most."
    files: tuple[str, ...]

    def text(self, top: int, heading: str = "profiler:", drawn: Callable[[Rows], list[str]] = aligned) -> str:
        """Return the report for a terminal, with at most `top` rows in each table."""
        last = self.first + self.updates - 1
        updates = f"updates {self.first} to {last}" if self.updates > 1 else f"update {self.first}"
        lines = [f"{heading} {updates}, recorded on {self.device}", ""]
        for title, rows in self.tables.items():
            lines += [*drawn(_table(title, rows[:top])), ""] if rows else []
        return "\n".join([*lines, *self.files, ""])

    def markdown(self, top: int) -> str:
        """Return the report as Markdown."""
        return self.text(top, "## Profile of", piped)


def _table(title: str, rows: Sequence[Row]) -> Rows:
    """Return a table without columns of zeros."""
    columns = {name: show for name, show in COLUMNS.items() if any(row.get(name) for row in rows)}
    cells = ((_short(row["name"]), *(show(row[name]) for name, show in columns.items())) for row in rows)
    return [(title, *columns), *cells]


def _short(name: str) -> str:
    """Shorten a name; those of kernels can be very long, with namespaces that all have."""
    name = name if len(name) <= LONGEST else re.sub(r"void |\(anonymous namespace\)::|\w+::", "", name)
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


# ---------------------------------------------------------------------------------------------------------------------
# From a recording


def conclude(trainer: forge.Run, recorded: profile, updates: int, parts: dict[str, int]) -> Report:
    """Write the trace and, with parts of memory, the snapshot; return the report of so many updates."""
    device, first = trainer.env.device, trainer.progress.update - updates
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if trainer.run_dir is None else trainer.run_dir / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank{trainer.env.rank}.{first}"  # WORKER.NUMBER is how TensorBoard reads such names
        files = {TRACE: folder / f"{stem}.pt.trace.json"}
        if parts and device.type == "cuda":
            files[SNAPSHOT] = folder / f"{stem}.memory-snapshot.pickle"
            dump_memory_snapshot(str(files[SNAPSHOT]))
        with quiet(device):
            recorded.export_chrome_trace(str(files[TRACE]))
        events = json.loads(files[TRACE].read_bytes())["traceEvents"] if parts or trainer.env.world > 1 else []
    averages = [each for each in recorded.key_averages() if not each.key.startswith(("ProfilerStep", "[memory]"))]
    on_host = [each for each in averages if each.device_type == DeviceType.CPU]
    on_device = [each for each in averages if each.device_type != DeviceType.CPU and not each.is_user_annotation]
    tables = {
        "ranges": _rows([each for each in on_host if each.is_user_annotation], "", updates),
        "collectives": collectives(events, updates),
        "operators": _rows([each for each in on_host if not each.is_user_annotation], "self_", updates),
        "kernels": _rows(on_device, "self_", updates),
        "memory": at_peak(parts, events, device) if parts else [],
    }
    return Report(
        device=str(device) if device.type != "cuda" else f"{device} ({torch.cuda.get_device_name(device)})",
        first=first,
        updates=updates,
        tables=tables,
        files=tuple(f"{what}: {short_path(file)}" for what, file in files.items() if trainer.run_dir is not None),
    )


def _rows(averages: Sequence[Any], own: str, updates: int) -> list[Row]:
    """Return what took time, the most first: on the device, if there is one. Bytes are taken ones, less freed ones."""
    rows: list[Row] = []
    for each in averages:
        host, device = (getattr(each, f"{own}{kind}_time_total") / 1e6 / updates for kind in ("cpu", "device"))
        taken = getattr(each, f"{own}device_memory_usage") or getattr(each, f"{own}cpu_memory_usage")
        row = {
            "name": each.key,
            "calls": each.count / updates,
            "host": host,
            "device": device,
            "bytes": taken / updates,
        }
        rows.append(row)
    by = "device" if any(row["device"] for row in rows) else "host"
    return sorted(rows, key=lambda row: row[by], reverse=True)


def publish(trainer: forge.Run, reports: list[Report], top: int) -> None:
    """Log the newest report, or print it where the log is off, and write all of them to the run folder."""
    text = reports[-1].text(top).rstrip()
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr)
    if trainer.run_dir is not None:
        folder = trainer.run_dir / "profile"
        (folder / "summary.md").write_text("\n".join(report.markdown(top) for report in reports))
        plain = {"recordings": [asdict(report) for report in reports]}
        (folder / "summary.json").write_text(json.dumps(plain, indent=1) + "\n")


@contextmanager
def quiet(device: torch.device) -> Generator[None]:
    """Suppress torch's remarks on its schedule and, without an accelerator, its tracing library's messages on stderr
    about missing accelerators."""
    silent = device.type == "cpu" and LOG_LEVEL not in os.environ
    if silent:
        os.environ[LOG_LEVEL] = "99"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler")
            yield
    finally:
        if silent:
            del os.environ[LOG_LEVEL]
