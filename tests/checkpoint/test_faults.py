"""A small share of `make faults`: runs that are killed anywhere end in the bits of a straight one."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.conftest import REPO
from tests.support import forked

FEW = [f"--only={case}" for case in ("run:0", "run:1", "run:2", "signal:15", "damage:14")]
"""Every kind of case and of precision, and every way to die; straight runs are shared."""


def rows(*words: str) -> list[dict[str, Any]]:
    """The table of these cases."""
    done = forked.run([sys.executable, "-m", "benchmarks.faults", *words, "--json"], cwd=REPO, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


@pytest.mark.parametrize(
    ("words", "cases", "deaths"),
    [
        ([*FEW, "--jobs=1"], 5, 4),
        pytest.param(["--runs=8", "--signals=4", "--damages=20", "--jobs=2"], 32, 12, marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_killed_and_damaged_runs_end_in_the_same_bits(words: list[str], cases: int, deaths: int) -> None:
    table = rows(*words)
    assert sum(row["cases"] for row in table) == cases
    assert {"amp bf16", "amp fp16", "signals"} <= {row["row"] for row in table}
    assert all(row["exact"] == row["cases"] for row in table)
    assert sum(row["deaths"] for row in table) >= deaths
