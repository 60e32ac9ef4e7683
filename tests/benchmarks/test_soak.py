"""A short share of the soak: nothing is left behind, and what is left behind on purpose is found."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from benchmarks import soak
from tests.support import forked


def call(*words: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Run the soak in a process of its own; return its exit code and its rows by part and quantity."""
    done = forked.call(partial(soak.main, ["--json", *words]))
    rows = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert rows, done.stderr
    return done.returncode, {(row["part"], row["quantity"]): row for row in rows}


@pytest.mark.slow
def test_descriptors_threads_and_tensors_stay_the_same() -> None:
    _, rows = call("--updates", "200", "--validations", "10", "--fits", "22")
    for part in ("run", "fits"):
        for quantity in ("descriptors", "threads", "tensors"):
            _, half, end = rows[part, quantity]["shown"]
            assert half == end, (part, quantity)


@pytest.mark.slow
def test_a_planted_leak_is_found() -> None:
    code, rows = call("--only", "run", "--updates", "60", "--validations", "6", "--plant", "descriptors")
    assert (code, rows["run", "descriptors"]["flat"]) == (1, False)
    assert rows["run", "threads"]["flat"]
