"""The benchmarks run and say what they promise. How fast anything is, is never asserted here."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import benchmarks.overhead
from benchmarks import figures, fp8, gpu, serving, startup
from tests.conftest import PROFILE
from tests.support import forked

KEYS = {
    "case",
    "contender",
    "us_per_update",
    "us_over_bare",
    "us_spread",
    "ratio",
    "us_over_bare_quiet",
    "ratio_quiet",
    "weights_identical",
    "updates",
    "rounds",
    "note",
}


CASES = ("mlp",) if PROFILE == "quick" else ("mlp", "transformer", "stack")


@pytest.fixture(scope="module")
def overhead() -> list[dict[str, Any]]:
    words = ["--json", "--peers", "none", "--updates", "5", "--rounds", "1", "--case", ",".join(CASES)]
    done = forked.call(partial(benchmarks.overhead.main, words))  # which switches oneDNN off
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_overhead_gives_a_row_for_every_case_and_contender(overhead: list[dict[str, Any]]) -> None:
    rows = overhead[1:]
    assert all(row.keys() == KEYS for row in rows)
    contenders = ("bare", "bare again", "forge", "forge guard", "forge default")
    expected = {(case, contender) for case in CASES for contender in contenders}
    assert {(row["case"], row["contender"]) for row in rows} == expected


@pytest.mark.slow
def test_every_contender_trains_the_same_weights_bit_for_bit(overhead: list[dict[str, Any]]) -> None:
    assert [row["contender"] for row in overhead[1:] if not row["weights_identical"]] == []


def test_startup_times_fresh_processes_against_the_first() -> None:
    first, second = startup.measure({"nothing": "pass", "json": "import json"}, rounds=2)
    assert (first.name, first.ratio, first.rounds) == ("nothing", 1.0, 2)
    assert second.ratio > 0


def test_gpu_measures_the_same_training_by_hand_and_with_forge(tmp_path: Path) -> None:
    case = gpu.CASES["mlp"]
    rows = [gpu.measure(case, row, tiny=True) for row in ("bare", "forge off")]
    assert all(row.ms_per_update > 0 for row in rows if row.ms_per_update is not None)
    # forge logs the mean of the last interval, the loop its last loss: both are of the same few updates
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=0.2)


@pytest.mark.slow
def test_fp8_measures_every_row_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8.main(["--tiny", "--json"]) == 0
    _, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["bf16", "all"]
    assert all(row["ms_per_update"] > 0 and row["speed"] is not None for row in rows)


@pytest.mark.slow
def test_serving_measures_both_arms_without_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--json", "--requests", "24", "--rounds", "1", "--clients", "4"]) == 0
    first, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert "cpu" in first["machine"]
    expected = [(where, arm) for where in ("batcher", "http") for arm in serving.ARMS]
    assert [(row["where"], row["arm"]) for row in rows] == expected
    assert all(row["requests"] == 24 and row["errors"] == 0 for row in rows)
    assert all(row["mean_batch"] == 1 and row["factor"] == 1 for row in rows if row["arm"] == "one by one")


def test_every_row_of_figures_is_measured_or_says_where_it_is_from() -> None:
    rows = list(map(figures.cells, re.findall(r"^\| [a-z].*$", figures.PAGE.read_text(), re.MULTILINE)))[1:]
    measures = figures.measures_of(figures.PAGE.read_text())
    assert figures.MEASURES.keys() <= measures.keys()
    for row, _, printed, found, command, where in rows:
        assert all((printed, found, command, where)), row
        if row in measures:
            assert f"--only {row}`" in command or command.startswith("`forge fit ")
            assert "torch" in where
        else:
            assert "](" in found, f"{row} has neither a measure nor a page that it is from"
