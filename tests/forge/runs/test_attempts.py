"""The lives of a run: a run that was continued shows the command of each process that made it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli import main
from forge.report.page import page
from forge.runs.attempts import attempts_of
from forge.runs.card import command
from forge.runs.folder import RunFolder
from forge_plugins import JSONL, Checkpoint, Tensorboard
from tests.forge.report.test_page import Page
from tests.support.tasks import SecondRank, fit

Live = Callable[..., None]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Live:
    """One life of the run in tmp_path, as if a command had been given: `live("forge fit mine", 3)`."""

    def live(command: str, updates: int, version: str = "1.0", **options: Any) -> None:
        monkeypatch.setattr(sys, "argv", command.split())
        monkeypatch.setattr("forge.runs.card.__version__", version)
        given = {"plugins": [JSONL(), Checkpoint(every="2 updates")], "run_dir": tmp_path, **options}
        fit(max_epochs=None, max_updates=updates, seed=1, **given)

    return live


def told(folder: Path) -> list[tuple[str, int]]:
    """(command, update) of every life."""
    return [(life.command, life.update) for life in attempts_of(RunFolder(folder))]


class TestARunThatWasContinued:
    @pytest.fixture(autouse=True)
    def twice(self, live: Live) -> None:
        live("forge fit mine task.lr=0.1", 3)
        live("forge fit mine --resume", 5, resume="auto", version="1.1", plugins=self.plugins())

    @staticmethod
    def plugins() -> list[forge.Plugin]:
        return [JSONL(), Checkpoint(every="2 updates"), Tensorboard()]

    def test_its_page_has_each_lifes_command_date_and_update(self, tmp_path: Path) -> None:
        first, second = attempts_of(RunFolder(tmp_path))
        text = Page(page([RunFolder(tmp_path)])).text
        assert f"1 {first.started} 0 forge fit mine task.lr=0.1 2 {second.started} 3 forge fit mine --resume" in text
        assert second.started == json.loads((tmp_path / "card.json").read_text())["started"]

    def test_the_card_has_them_in_text_and_in_tensorboard(self, tmp_path: Path) -> None:
        from tests.forge_plugins.test_tensorboard import read, text_of

        first, second = attempts_of(RunFolder(tmp_path))
        lines = [
            f"1. {first.started}, from update 0: `forge fit mine task.lr=0.1`",
            f"2. {second.started}, from update 3: `forge fit mine --resume` (forge 1.0 → 1.1)",
        ]
        for card in ((tmp_path / "card.md").read_text(), text_of(read(tmp_path), "card")):
            assert card.rstrip().splitlines()[-2:] == lines

    def test_a_comparison_has_all_commands_and_recipes(self, tmp_path: Path, capsys: Any) -> None:
        fit(max_updates=5, max_epochs=None, seed=2, plugins=[JSONL()], run_dir="runs/other")
        assert main(["runs", "compare", str(tmp_path), "runs/other", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        around = found["surroundings"]
        assert around["command"][0] == "forge fit mine task.lr=0.1; from update 3: forge fit mine --resume"
        assert around["forge"][0] == "1.0, then 1.1"
        assert "torch" not in around
        assert found["recipe"]["trainer.seed"] == [1, 2]

    def test_a_life_killed_before_its_card_loses_none(
        self, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def killed(card: dict[str, Any], folder: Path, *rest: Any) -> None:
            (folder / "card.json").write_text('{"star')
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("forge.engine.session.write_card", killed)
            with pytest.raises(KeyboardInterrupt):
                live("forge fit mine --resume --again", 7, resume="auto", plugins=self.plugins())
        assert "forge fit mine --resume --again" in page([RunFolder(tmp_path)])  # without a card that can be read
        live("forge fit mine --resume --at-last", 7, resume="auto", plugins=self.plugins())
        ends = [(command.split()[-1], update) for command, update in told(tmp_path)]
        assert ends == [("task.lr=0.1", 0), ("--resume", 3), ("--again", 5), ("--at-last", 5)]

    def test_a_life_killed_while_written_leaves_the_others(
        self, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, replace = told(tmp_path), os.replace

        def killed(beside: Path, file: Path) -> None:
            if file.name == "lives.json":
                assert "--too-late" in beside.read_text()
                raise KeyboardInterrupt
            replace(beside, file)

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            live("forge fit mine --resume --too-late", 7, resume="auto", plugins=self.plugins())
        assert told(tmp_path) == before

    def test_a_resume_that_is_refused_is_no_life(self, live: Live, tmp_path: Path) -> None:
        with pytest.raises(forge.ForgeError, match="seed"):
            fit(seed=9, plugins=self.plugins(), run_dir=tmp_path, resume="auto", max_updates=9)
        assert len(told(tmp_path)) == 2


def test_a_run_of_one_life_looks_as_before(live: Live, tmp_path: Path) -> None:
    live("forge fit mine", 3)
    assert not (tmp_path / "lives.json").exists()
    assert "Attempts" not in (tmp_path / "card.md").read_text()
    text = Page(page([RunFolder(tmp_path)])).text
    assert "Attempts" not in text
    assert "command forge fit mine " in text
    assert RunFolder(tmp_path).attempts == []


def test_a_fit_into_the_folder_of_an_earlier_run_starts_afresh(live: Live, tmp_path: Path) -> None:
    live("forge fit mine", 2)
    live("forge fit mine --resume", 4, resume="auto")
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / f"away-{checkpoint.name}")
    live("forge fit other", 2)
    assert told(tmp_path) == [("forge fit other", 0)]
    assert not (tmp_path / "lives.json").exists()
    assert "forge fit mine" not in page([RunFolder(tmp_path)])


def test_a_resume_that_finds_no_checkpoint_is_a_first_life(live: Live, tmp_path: Path) -> None:
    live("forge fit mine", 2, plugins=[JSONL()])
    live("forge fit mine --resume", 4, plugins=[JSONL()], resume="auto")
    assert told(tmp_path) == [("forge fit mine --resume", 0)]


def test_a_run_that_branches_off_begins_a_life_of_its_own(live: Live, tmp_path: Path) -> None:
    live("forge fit mine", 2)
    live("earlier.py", 1, run_dir=tmp_path / "branch", plugins=[JSONL()])
    live("branch.py", 4, run_dir=tmp_path / "branch", resume=tmp_path / "checkpoints" / "latest")
    assert told(tmp_path / "branch") == [("branch.py", 2)]
    assert "resumed from update 2" in Page(page([RunFolder(tmp_path / "branch")])).text


def test_a_run_without_a_history_is_continued_by_its_card(live: Live, tmp_path: Path) -> None:
    live("forge fit mine", 2)
    live("forge fit mine --resume", 4, resume="auto")
    (tmp_path / "lives.json").unlink()
    assert "resumed from update 2" in Page(page([RunFolder(tmp_path)])).text
    live("forge fit mine --resume --more", 6, resume="auto")
    assert told(tmp_path) == [("forge fit mine --resume", 2), ("forge fit mine --resume --more", 4)]


def test_a_run_resumed_often_shows_first_and_last_lives(live: Live, tmp_path: Path) -> None:
    live("forge fit mine", 1)
    live("forge fit mine --resume", 2, resume="auto")
    file = tmp_path / "lives.json"
    first, second = json.loads(file.read_text())["lives"]
    file.write_text(json.dumps({"lives": [first, *[{**second, "update": i} for i in range(1, 40)]]}))
    text = page([RunFolder(tmp_path)])
    assert text.count("forge fit mine") == 10
    assert "30 more in lives.json." in text
    assert "<td class='n'>39</td>" in text
    fit(plugins=[JSONL()], run_dir="runs/other")
    command = "forge fit mine; from update 1: forge fit mine --resume (39 times)"
    assert command in page([RunFolder(tmp_path), RunFolder("runs/other")])


def test_other_ranks_than_the_first_write_nothing(live: Live, tmp_path: Path) -> None:
    (tmp_path / "lives.json").write_text("the first rank's")
    live("forge fit mine", 2, plugins=[JSONL(), SecondRank()])
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["lives.json"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/usr/bin/forge", "fit", "mine", "a=b c"], "forge fit mine 'a=b c'"),
        (["/somewhere/forge/__main__.py", "fit", "mine"], "python -m forge fit mine"),
        (["/home/me/my script.py"], "'my script.py'"),
    ],
)
def test_a_command_is_told_as_it_was_typed(words: list[str], told: str) -> None:
    assert command(words) == told
