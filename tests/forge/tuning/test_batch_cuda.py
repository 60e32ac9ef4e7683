"""On a GPU the search for a batch meets a real end of memory, and keeps to a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture
def found(run_python: Callable[..., Any], repo: Path) -> Any:
    """What the searches found in a process of their own: tests before may hold memory of this one."""
    done = run_python("-m", "tests.forge.tuning.batch_probe", paths=[repo])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def fitting(probes: list[Any]) -> list[Any]:
    return [probe for probe in probes if not probe["why_not"]]


def test_a_batch_is_found_under_a_budget_and_at_the_real_end(found: Any) -> None:
    budget, real = found["budget"]["probes"], found["real"]["probes"]
    assert max(probe["size"] for probe in fitting(budget)) < 64
    assert {probe["why_not"] for probe in budget} == {"", "over the limit of 1 GB"}
    largest = max(probe["size"] for probe in fitting(real))
    assert 20 <= largest <= 64  # forward and backward hold two to five tensors of 16 MB for a sample
    assert any(probe["size"] == largest + 1 and probe["why_not"] == "out of memory" for probe in real)
    assert all(probe["memory"] <= found["limit"] and probe["speed"] > 0 for probe in fitting(real))
    assert found["left"] <= 1024**2
