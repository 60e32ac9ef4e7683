"""forge runs: a group is one row; programs get its options and results."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.cli import main
from forge.runs.find import locate
from forge.runs.folder import RunFolder
from forge.runs.group import RunGroup
from tests.support.run_folders import card, listed, write_group, write_run


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> Path:
    return empty_folder


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["runs", *words]) == 0
    return capsys.readouterr().out


class TestAGroup:
    def test_it_is_one_row_with_its_runs_folded(self, capsys: pytest.CaptureFixture[str]) -> None:
        write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0}, planned=3)
        write_run("mine/alone", {"update": 1}, card=card(2))
        out = printed(capsys)
        assert [line.split()[0] for line in out.splitlines()[1:]] == ["mine/alone", "mine/g"]
        assert "1.50 ± 0.71" in out
        assert "2 finished of 3" in out
        every = printed(capsys, "--all").splitlines()[1:]
        assert [line.split()[0] for line in every] == ["mine/alone", "mine/g", "mine/g/seed-0", "mine/g/seed-1"]

    def test_its_own_folder_shows_the_worst(self, capsys: pytest.CaptureFixture[str]) -> None:
        write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0, "seed-2": 6.0})
        out = printed(capsys, "runs/mine/g")
        row = next(line for line in out.splitlines() if line.startswith("val/loss"))
        assert row.split() == ["val/loss", "3.0", "±", "2.6", "6", "seed-2", "3"]
        assert "mine/g/seed-1" in out

    def test_programs_get_all_of_it(self) -> None:
        write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0})
        (row,) = listed()
        assert row["metrics"]["val/loss"] == 1.5
        assert row["spread"]["val/loss"]["n"] == 2
        assert row["spread"]["val/loss"]["worst"] == {"run": "seed-1", "value": 2.0}
        assert [run["metrics"]["val/loss"] for run in row["runs"]] == [1.0, 2.0]

    def test_it_is_sorted_by_its_mean_and_found_by_its_name(self) -> None:
        write_group("mine/a", {"seed-0": 3.0, "seed-1": 1.0}, day=1)
        write_group("mine/b", {"seed-0": 1.5, "seed-1": 1.7}, day=2)
        assert [row["name"] for row in listed("--sort", "val/loss")] == ["mine/b", "mine/a"]
        assert isinstance(locate("runs/mine/a"), RunGroup)
        assert isinstance(locate("mine/b"), RunGroup)
        assert isinstance(locate("runs/mine"), RunGroup)
        assert locate("mine/b/seed-1").path == Path("runs/mine/b/seed-1")
        assert type(locate("runs/mine/a/seed-0")) is RunFolder

    def test_two_are_compared_by_their_means(self, capsys: pytest.CaptureFixture[str]) -> None:
        write_group("mine/a", {"seed-0": 3.0, "seed-1": 1.0}, day=1)
        write_group("mine/b", {"seed-0": 1.5, "seed-1": 1.7}, day=2)
        out = printed(capsys, "compare", "runs/mine/a", "runs/mine/b")
        row = next(line for line in out.splitlines() if line.startswith("val/loss"))
        assert row.split() == ["val/loss", "2.0", "±", "1.4", "1.60", "±", "0.14", "-0.4"]
        assert "task.lr" in out
        assert "trainer.seed" not in out, "both have the same seeds"


class TestOptions:
    def test_programs_choose_runs_by_them(self) -> None:
        described = card(1) | {"task": {"class": "Net", "options": {"lr": 0.1}}}
        write_run("mine/a", end={"status": "finished", "metrics": {"val/loss": 0.5}}, card=described)
        write_group("mine/g", {"seed-0": 0.3, "seed-1": 0.5})
        options = {row["name"]: row["options"] for row in listed()}
        assert options["mine/a"]["task.lr"] == 0.1
        assert options["mine/g"]["trainer.seed"] == [0, 1]

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (["spans"], "Write: forge runs spans RUN"),
            (["compare", "mine/a", "mine/a", "--sort", "val/loss"], "for the list of runs"),
        ],
    )
    def test_a_mistake_is_said(self, words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
        write_run("mine/a", {"update": 1}, card=card(1))
        assert main(["runs", *words]) == 2
        assert why in capsys.readouterr().err
