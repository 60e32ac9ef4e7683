"""Under every strategy a rank that is killed or stalls ends the run in time, with a report that names it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.forge.distributed.test_failures import HOST, TASK, Start, start

begun = start
ROOT = Path(__file__).parents[3]
WIDE = "from tests.forge.snapshot.test_resharding import Wide as TinyTask, data as batches"
"""The task of the tests of resharding: its layers can be cut into stages and sharded, its sequences divided."""
STRATEGIES = ["fsdp", "zero", "pipeline", "context_parallel"]


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    task = TASK.replace("from forge.testing import TinyTask, tiny_batches", WIDE)
    task = task.replace("tiny_batches([8] * 8)", "batches()")
    assert "tiny_batches" not in task
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return lambda how, **options: start(how, task=task, **options)


def options_of(strategy: str, **more: Any) -> tuple[str, ...]:
    wanted: dict[str, Any] = {"fsdp": {"min_size": 0}, "pipeline": {"microbatches": 4}}.get(strategy, {}) | more
    beside = ("-p", "ddp") if strategy == "context_parallel" else ()
    averages = "ddp" if beside else strategy
    return (*beside, *(f"{averages}.{name}={value}" for name, value in wanted.items()))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_rank_is_missed(begin: Start, strategy: str) -> None:
    ranks = begin("kill", strategy=strategy, options=options_of(strategy))
    assert ranks.codes() == [1, -signal.SIGKILL]
    assert f"rank 1 of 2 on {HOST} failed first: gone (killed?): its process has ended, while rank 0" in ranks.text
    assert "Traceback" not in ranks.text


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stall_names_the_rank(begin: Start, strategy: str) -> None:
    ranks = begin("stall", strategy=strategy, options=options_of(strategy, watchdog=3))
    assert ranks.codes() == [1, 1]
    text = ranks.text
    assert text.count("The run has stalled") == 1
    assert "no progress for 3 s at update 3" in text
    assert re.search("rank 1 is missing from |rank 1 waits in no collective", text), text
    assert "time.sleep(600)" in text.split("rank 1, main thread")[1]
    assert text.endswith("\n\nThis report, and the latest collectives of each rank: run/stall\n")
