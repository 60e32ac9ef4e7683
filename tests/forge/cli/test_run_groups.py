"""forge runs: a group is one row; tags, notes and conditions choose runs."""

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

    def test_its_own_folder_shows_interval_and_worst(self, capsys: pytest.CaptureFixture[str]) -> None:
        write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0, "seed-2": 6.0})
        out = printed(capsys, "runs/mine/g")
        row = next(line for line in out.splitlines() if line.startswith("val/loss"))
        assert row.split() == ["val/loss", "3.0", "±", "2.6", "-3.6", "to", "9.6", "6", "seed-2", "3"]
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


class TestTagsAndNotes:
    def test_they_are_given_and_taken(self, capsys: pytest.CaptureFixture[str]) -> None:
        run = write_run("mine/a", {"update": 1}, card=card(1))
        before = (run / "card.json").read_bytes()
        assert "base, paper" in printed(capsys, "tag", "mine/a", "base", "paper", "base")
        assert "a: paper" in printed(capsys, "untag", "mine/a", "base")
        assert "the rate was high" in printed(capsys, "note", "mine/a", "the", "rate was high")
        assert "the rate was high" in printed(capsys, "note", "mine/a")
        (row,) = listed()
        assert (row["tags"], row["note"]) == (["paper"], "the rate was high")
        assert "paper" in printed(capsys)
        assert "no note" in printed(capsys, "note", "mine/a", "")
        assert (run / "card.json").read_bytes() == before

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (["tag", "mine/a"], "Write: forge runs tag RUN TAG"),
            (["tag", "mine/a", "two words"], "is no tag"),
            (["untag", "mine/a", "odd"], "has no tag 'odd'; it has none"),
            (["note"], "Write: forge runs note RUN TEXT"),
            (["tag", "mine/a", "x", "--sort", "val/loss"], "for the list of runs"),
            (["--where", "nothing"], "is no condition"),
            (["--where", "task.rl=1"], "Did you mean 'task.lr'"),
        ],
    )
    def test_a_mistake_is_said(self, words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
        write_run("mine/a", {"update": 1}, card=card(1) | {"task": {"class": "Net", "options": {"lr": 0.1}}})
        assert main(["runs", *words]) == 2
        assert why in capsys.readouterr().err

    def test_a_strangers_notes_are_skipped_where_they_are_odd(self) -> None:
        run = write_run("mine/a", {"update": 1})
        for text in ("[]", "{", '{"tags": [1, "a", null], "note": 3}'):
            (run / "notes.json").write_text(text)
            assert (RunFolder(run).tags, RunFolder(run).note) in (([], ""), (["a"], ""))
        (run / "notes.json").unlink()
        (run / "notes.json").symlink_to("/etc/hostname")
        assert RunFolder(run).tags == []


class TestConditions:
    @pytest.fixture(autouse=True)
    def three(self) -> None:
        for name, rate, loss, status in (
            ("a", 0.1, 0.5, "finished"),
            ("b", 0.2, 0.2, "finished"),
            ("c", 0.1, 0.1, "failed"),
        ):
            described = card(1) | {"task": {"class": "Net", "options": {"lr": rate, "act": "relu"}}}
            write_run(f"mine/{name}", end={"status": status, "metrics": {"val/loss": loss}}, card=described)
        write_group("mine/g", {"seed-0": 0.3, "seed-1": 0.5})

    @pytest.mark.parametrize(
        ("words", "names"),
        [
            (["task.lr=0.1"], "acg"),
            (["task.lr=1e-1", "val/loss<0.45"], "cg"),
            (["val/loss<=0.2"], "bc"),
            (["val/loss>=0.4"], "ag"),
            (["status!=finished"], "c"),
            (["task.act=relu"], "abc"),
            (["trainer.seed=1"], "g"),
            (["task.lr>0.15"], "b"),
        ],
    )
    def test_options_and_metrics_are_compared(self, words: list[str], names: str) -> None:
        found = listed(*(word for condition in words for word in ("--where", condition)))
        assert sorted(row["name"][-1] for row in found) == list(names)

    def test_tags_are_those_of_runs_and_groups(self) -> None:
        assert main(["runs", "tag", "mine/a", "x", "y"]) == 0
        assert main(["runs", "tag", "mine/g/seed-1", "x"]) == 0
        assert sorted(row["name"] for row in listed("--tag", "x")) == ["mine/a", "mine/g"]
        assert [row["name"] for row in listed("--tag", "x", "--tag", "y")] == ["mine/a"]

    def test_none_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["runs", "--where", "val/loss<0"]) == 0
        assert "No run has all of these" in capsys.readouterr().err
