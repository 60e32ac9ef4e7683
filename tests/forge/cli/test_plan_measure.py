"""`forge plan --measure`: a few real updates, a table of costs, and nothing left behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from forge.cli import main

RECIPE = ["quickstart", "task.hidden=16", "-p", "no:tensorboard"]
Forge = Callable[..., tuple[int, str, str]]


@pytest.fixture
def forge(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Forge:
    """Runs a command: (exit code, stdout, stderr). Temporary folders are made in `tmp_path`."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_costs_of_every_plugin_come_after_the_plan(forge: Forge) -> None:
    code, out, err = forge("plan", *RECIPE, "--measure", "--updates", "25")
    assert (code, err) == (0, "")
    plan, _, costs = out.partition("Costs, measured")
    assert "Stack, outermost first" in plan
    assert "24 updates of" in costs
    for plugin, hook in (("clip", "edit_grads"), ("guard", "inspect_grads"), ("jsonl", "log"), ("checkpoint", "save")):
        assert any(line.split()[:2] == [plugin, hook] for line in costs.splitlines())
    assert "forge.plan" not in out


@pytest.mark.slow
def test_what_a_task_prints_does_not_get_into_the_json(forge: Forge) -> None:
    Path("chatty.py").write_text(
        """
from forge.data import Splits
from forge.testing import TinyTask, tiny_batches

class Chatty(TinyTask):
    def training_step(self, batch):
        print("hello")
        return super().training_step(batch)

def data():
    return Splits(train=tiny_batches([8] * 20))
"""
    )
    _, out, err = forge("plan", "chatty.py", "-p", "no:tensorboard", "--measure", "--updates", "4", "--json")
    measured = json.loads(out)["measured"]
    assert measured["updates"] == 3
    assert {row["plugin"] for row in measured["rows"]} >= {"guard", "progress"}
    assert sum(row["share"] for row in measured["rows"]) <= 1
    assert "hello" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "--updates", "1"], "--updates must be at least 2"),
        (["--updates", "7"], "--updates is an option of --measure: add --measure."),
    ],
)
def test_what_cannot_be_measured_is_refused(forge: Forge, words: list[str], message: str) -> None:
    code, _, err = forge("plan", *RECIPE, *words)
    assert code == 2
    assert err.startswith(f"error: {message}")
