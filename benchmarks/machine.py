"""Describe the machine of a measurement."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def describe() -> dict[str, str | int]:
    """Return CPU model, cores, Python, torch and today's date as plain data for one JSON line."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": version("torch") or "none",
        "date": datetime.now(UTC).date().isoformat(),
    }


def sentence() -> str:
    """Return the same in one line, for the head of a table."""
    return "{cpu}, {cores} cores, Python {python}, torch {torch}, {date}".format(**describe())


def show(rows: Sequence[Any], table: Callable[[Any], Table], as_json: bool, width: int | None = None) -> None:
    """Print the machine, and rows as JSON lines or as a table; `width` where the output is no terminal."""
    if as_json:
        for line in ({"machine": describe()}, *map(asdict, rows)):
            print(json.dumps(line))
        return
    print(sentence())
    Console(width=None if sys.stdout.isatty() else width).print(table(rows))


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return Linux's model name of the CPU, or the architecture if missing, as on ARM."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
