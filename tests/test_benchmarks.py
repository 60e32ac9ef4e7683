"""The benchmarks run and say what they promise. How fast anything is, is never asserted here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
KEYS = {
    "case",
    "contender",
    "us_per_update",
    "us_over_bare",
    "us_spread",
    "us_over_bare_quiet",
    "ratio",
    "weights_identical",
    "updates",
    "rounds",
    "note",
}


def run_benchmark(*words: str) -> list[dict[str, Any]]:
    paths = [str(ROOT), str(ROOT / "plugins"), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def overhead() -> list[dict[str, Any]]:
    return run_benchmark("benchmarks.overhead", "--json", "--peers", "none", "--updates", "20", "--rounds", "1")


def test_overhead_begins_with_the_machine(overhead: list[dict[str, Any]]) -> None:
    assert {"cpu", "cores", "torch"} <= overhead[0]["machine"].keys()


def test_overhead_gives_a_row_for_every_case_and_contender(overhead: list[dict[str, Any]]) -> None:
    rows = overhead[1:]
    assert all(row.keys() == KEYS for row in rows)
    contenders = ("bare", "bare again", "forge", "forge default")
    expected = {(case, contender) for case in ("mlp", "transformer", "stack") for contender in contenders}
    assert {(row["case"], row["contender"]) for row in rows} == expected


def test_every_contender_trains_the_same_weights_bit_for_bit(overhead: list[dict[str, Any]]) -> None:
    assert [row["contender"] for row in overhead[1:] if not row["weights_identical"]] == []


def test_a_peer_that_does_not_exist_is_refused_by_name() -> None:
    words = [sys.executable, "-m", "benchmarks.overhead", "--peers", "lightening"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "'lightening' is not one of lightning" in done.stderr


def test_startup_compares_forge_with_torch() -> None:
    rows = run_benchmark("benchmarks.startup", "--json", "--rounds", "1", "--only", "torch,forge")[1:]
    assert [row["name"] for row in rows] == ["torch", "forge"]
    assert all(row.keys() == {"name", "program", "cpu_s", "ratio", "ratio_quiet", "rounds"} for row in rows)
