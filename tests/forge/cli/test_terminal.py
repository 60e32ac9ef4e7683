"""What reaches the terminal: names from outside are text, neither escape sequences nor markup."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forge.cli import main
from forge.util.text import visible
from forge_plugins import Progress
from forge_plugins.progress.status import Status
from tests.support.tasks import Classifier, fit, make_batches

CLEAR, TITLE, C1, MARKUP = "\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "[bold red]x[/nothing]"
HOSTILE = f"val/{CLEAR}{TITLE}{C1}{MARKUP}\u202e\r"
SHOWN = r"val/\x1b[2J\x1b]0;owned\x07\x9b31m[bold red]x[/nothing]\u202e\x0d"


def test_control_characters_are_made_visible() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("ä 日本\tx\n") == "ä 日本\tx\n"
    assert visible(os.fsdecode(b"\xff")) == r"\xff"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / f"runs{MARKUP.replace('/', '')}" / f"\x1b[31mrun{os.fsdecode(bytes([255]))}"
    folder.mkdir(parents=True)
    stack = [{"name": HOSTILE, "options": {HOSTILE: HOSTILE}}]
    (folder / "card.json").write_text(json.dumps({"recipe": HOSTILE, "task": {"class": HOSTILE}, "stack": stack}))
    (folder / "metrics.jsonl").write_text(json.dumps({"update": 1, HOSTILE: 0.5}) + "\n")
    (folder / "end.json").write_text(json.dumps({"status": "finished", "reason": HOSTILE, "metrics": {HOSTILE: 0.5}}))
    return folder


def clean(text: str) -> bool:
    return not set(text) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E)}


@pytest.mark.parametrize("verb", ["runs", "compare", "sort", "report", "missing"])
def test_a_strangers_names_are_printed_as_text(run: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = run.with_name("other")
    other.mkdir()
    (other / "card.json").write_text("{}")
    words = {
        "runs": ["runs", str(run.parent)],
        "compare": ["runs", "compare", str(run), str(other)],
        "sort": ["runs", str(run.parent), "--sort", HOSTILE],
        "report": ["report", str(run)],
        "missing": ["runs", str(run.parent), "--sort", f"{HOSTILE}?"],
    }[verb]
    assert main(words) == (2 if verb == "missing" else 0)
    said = capsys.readouterr()
    assert clean(said.out + said.err)
    if verb in ("compare", "missing"):
        assert SHOWN[:11] in said.out + said.err


def test_progress_prints_names_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    class Named(Classifier):
        def validation_step(self, batch: object) -> dict[str, float]:
            return {CLEAR: 1.0}

    fit(Named(), val=make_batches(1), plugins=[Progress()])
    said = capsys.readouterr()
    assert clean(said.out + said.err)
    assert r"\x1b[2J" in said.err
    status = Status("fit", 1, 1)
    status.log(1, {HOSTILE: 1.0})
    assert list(status.metrics) == [SHOWN]
