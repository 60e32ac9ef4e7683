"""A small share of `make faults`: runs that are killed anywhere end in the bits of a straight one."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import REPO


def test_killed_signalled_and_damaged_runs_end_in_the_same_bits() -> None:
    command = ["--runs", "8", "--signals", "4", "--damages", "20", "--jobs", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *command], cwd=REPO, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert sum(row["cases"] for row in rows) == 32
    assert {"amp bf16", "amp fp16", "signals"} <= {row["row"] for row in rows}
    assert all(row["exact"] == row["cases"] for row in rows)
    assert sum(row["deaths"] for row in rows) >= 12
