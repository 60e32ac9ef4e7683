"""The time of an examination: what is left out is listed, and a signal ends it with what it has."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import forge
from forge import cli
from forge_doctor import Deadline
from forge_doctor.probe_order import AFTER, BEFORE, LAST
from tests.forge_doctor.test_doctor import FILE
from tests.support.patients import Healthy, splits


def ticking(seconds: float, step: float = 1.0) -> Deadline:
    """A deadline whose clock goes on by a step at each look."""
    return Deadline(seconds, itertools.count(0.0, step).__next__)


def test_a_deadline_knows_what_is_left_of_it() -> None:
    never, soon = Deadline(), ticking(10)
    assert not never.is_over
    assert not never.part(0.5).is_over
    assert soon.left == 9
    assert soon.part(0.5).seconds == 0.5 * (10 - 2)
    assert ticking(1).left == 0


def test_without_time_everything_is_left_out_and_listed() -> None:
    report = forge.doctor(Healthy(), *splits(), deadline=Deadline(0))
    assert report.findings == []
    assert report.partial == "the time was over"
    assert set(BEFORE) | set(AFTER) | set(LAST) <= report.skipped.keys()
    assert set(report.skipped.values()) == {"there was no time for it"}


def test_what_runs_in_time_is_examined_in_order_and_the_rest_is_listed() -> None:
    report = forge.doctor(Healthy(), *splits(), deadline=ticking(200))
    done = [name for name in BEFORE if name in report.good]
    late = [name for name in BEFORE if name in report.skipped]
    assert done
    assert late
    assert list(BEFORE).index(late[-1]) == len(BEFORE) - 1
    assert not set(done) & set(late)
    assert report.partial


SIGNALLED = FILE.replace("import torch\n", "import os\nimport signal\nimport torch\n", 1).replace(
    "        x, y = batch\n        return",
    "        x, y = batch\n        Task.steps += 1\n        if Task.steps == WHEN:\n"
    "            os.kill(os.getpid(), signal.NAME)\n        return",
)
SIGNALLED = SIGNALLED.replace("class Task(forge.TaskModule):\n", "class Task(forge.TaskModule):\n    steps = 0\n\n")


@pytest.mark.parametrize(("name", "when", "code"), [("SIGTERM", 30, 143), ("SIGINT", 30, 130)])
def test_a_signal_ends_it_with_what_it_has(
    name: str, when: int, code: int, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("signalled.py").write_text(SIGNALLED.replace("WHEN", str(when)).replace("NAME", name))
    assert cli.main(["doctor", "signalled.py:Task", "--quick", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["partial"]
    assert "broadcast_loss" in [finding["name"] for finding in found["findings"]]


def test_a_budget_must_be_above_zero(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("task.py").write_text(FILE)
    assert cli.main(["doctor", "task.py:Task", "--budget", "0"]) == 2
    assert "--budget is 0. Write minutes above 0" in capsys.readouterr().err
