"""A small share of `make faults`: runs that are killed anywhere end in the bits of a straight one."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import pytest

from benchmarks.fault_kinds.crash_states import CRASHES
from benchmarks.fault_kinds.preload import KINDS
from tests.conftest import REPO
from tests.support import forked
from tests.support.patience import PATIENCE

FEW = [f"--only={case}" for case in ("run:2", "signal:15")]
"""A run that is killed, and one that is told to stop; damage and logs have tests of their own beside this one."""

MANY = ["--runs=8", "--signals=4", "--damages=20", "--logs=12", "--io=0", "--crashes=0", "--jobs=2"]
CALLS = ["--runs=0", "--signals=0", "--damages=0", "--logs=0", "--io=14", "--crashes=15", "--jobs=2"]
needs_cc = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="calls are caught on Linux, with a C compiler"
)


def rows(*words: str) -> list[dict[str, Any]]:
    """The table of these cases."""
    done = forked.run([sys.executable, "-m", "benchmarks.faults", *words, "--json"], cwd=REPO, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


@pytest.mark.parametrize(
    ("words", "cases", "deaths"),
    [
        ([*FEW, "--jobs=1"], 2, 2),
        pytest.param(MANY, 44, 24, marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_killed_and_damaged_runs_end_in_the_same_bits(words: list[str], cases: int, deaths: int) -> None:
    table = rows(*words)
    assert sum(row["cases"] for row in table) == cases
    assert {"amp fp16", "signals"} <= {row["row"] for row in table}
    assert all(row["exact"] == row["cases"] for row in table)
    assert sum(row["deaths"] for row in table) >= deaths


@needs_cc
@pytest.mark.slow
def test_failing_calls_and_crashes_end_in_the_same_bits() -> None:
    table = rows(*CALLS)
    assert {row["row"] for row in table} == {*(f"failing {kind}" for kind in KINDS), *(f"crash, {c}" for c in CRASHES)}
    assert sum(row["cases"] for row in table) == sum(row["exact"] for row in table) == 29
