"""`forge doctor --ready`: what exists is run, and one table says whether a long run may begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge import cli
from forge_doctor import ready
from forge_doctor.ready import Check, Ended


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each ends well, and the doctor finds nothing, unless a test says otherwise."""
    run: list[list[str]] = []

    def answers(words: list[str]) -> Ended:
        run.append(words)
        clean = {"findings": [], "seconds": 3.0, "facts": {"the data": "train: 8 samples"}}
        return Ended(0, json.dumps(clean) if words[0] == "doctor" else "smoke  it runs\n", "")

    monkeypatch.setattr(ready, "forge", answers)
    return run


def table(*target: str) -> dict[str, Check]:
    return {check.what: check for check in ready.checks(target, lambda what: None)}


def test_every_verb_that_answers_is_asked_of_the_same_target(commands: list[list[str]]) -> None:
    found = table("quickstart", "task.hidden=4")
    assert [words[0] for words in commands] == ["plan", "fit", "doctor", "verify-resume", "determinism"]
    assert all(words[1:3] == ["quickstart", "task.hidden=4"] for words in commands)
    assert found["the data"].evidence == "train: 8 samples"
    assert found["mistakes that raise no error"].evidence == "none found in 3 s"
    assert ready.may_start(list(found.values()))


def test_nothing_follows_a_stage_that_does_not_run(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ready, "forge", lambda words: commands.append(words) or Ended(1, "", "error: no such task\n  at")
    )
    (found,) = ready.checks(["nothing.py:Task"], lambda what: None)
    assert (found.result, found.evidence, found.again) == ("error", "error: no such task", "forge plan nothing.py:Task")
    assert not ready.may_start([found])


@pytest.mark.slow
def test_the_verb_answers_for_a_real_task(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    assert cli.main(["doctor", "quickstart", "task.hidden=8", "--ready", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["may_start"]
    results = {check["what"]: check["result"] for check in said["checks"]}
    for what in ("every stage runs", "a killed run ends in the same bits", "two runs are equal"):
        assert results[what] == "good"
    assert not list(empty_folder.iterdir())
