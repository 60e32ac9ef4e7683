"""forge runs: every run with its result, and an honest word on how it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from tests.support.patience import PATIENCE
from tests.support.run_folders import card, listed, write_run


class TestTheList:
    def test_the_newest_run_comes_first(self) -> None:
        for day in (2, 3, 1):
            write_run(f"mine/{day}", {"update": day}, card=card(day))
        assert [run["name"] for run in listed()] == ["mine/3", "mine/2", "mine/1"]

    def test_a_row_has_recipe_task_status_updates_and_metrics(self, capsys: Any, monkeypatch: Any) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        end = {"status": "finished", "updates": 8, "seconds": 75.0, "metrics": {"val/loss": 0.25, "train/loss": 1.0}}
        write_run("mine/one", end=end, card=card(1, planned_updates=9))
        write_run("mine/two", {"update": 4, "val/loss": 0.5, "time": 1.0}, card=card(2))
        assert main(["runs"]) == 0
        head, two, one = (line.split() for line in capsys.readouterr().out.splitlines())
        assert head == ["run", "recipe", "task", "status", "updates", "started", "duration", "val/loss"]
        assert one[:5] == ["mine/one", "mine", "Net", "finished", "8/9"]
        assert one[-5:] == ["1", "min", "15", "s", "0.25"]
        assert two[:5] == ["mine/two", "mine", "Net", "killed", "4"]
        assert two[-1] == "0.5"

    def test_it_is_sorted_by_a_metric_the_best_first(self) -> None:
        for name, loss, points in (("a", 0.5, 1.0), ("b", 0.1, 3.0), ("c", 0.9, 2.0)):
            write_run(f"mine/{name}", {"update": 1, "val/loss": loss, "val/points": points}, card=card(1))
        write_run("mine/none", {"update": 1}, card=card(9))
        assert [run["name"][-1] for run in listed("--sort", "val/loss")] == ["b", "a", "c", "e"]
        assert [run["name"][-1] for run in listed("--sort", "val/points")] == ["b", "c", "a", "e"]

    @pytest.mark.parametrize("columns", [40, 60, 80, 120])
    def test_a_narrow_terminal_loses_columns_and_no_digits(self, capsys: Any, monkeypatch: Any, columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        write_run(
            "quickstart/20260101-120000-abcd", {"update": 1, "val/loss": 0.12345, "val/accuracy": 0.98765}, card=card(1)
        )
        assert main(["runs"]) == 0
        out = capsys.readouterr().out
        assert "0.12345" in out
        assert "20260101-120000-abcd" in out
        assert max(map(len, out.splitlines())) <= columns

    def test_a_folder_can_be_given_and_runs_inside_of_runs_are_none(self) -> None:
        write_run("a/one", card=card(1))
        write_run("b/two", card=card(1))
        write_run("b/two/checkpoints/not", card=card(1))
        assert [run["name"] for run in listed("runs/b")] == ["b/two"]

    def test_mistakes_are_answered_with_what_there_is(self, capsys: Any) -> None:
        write_run("quickstart/one", {"update": 1, "val/loss": 1.0}, card=card(1))
        assert main(["runs", "runs/quickstrat"]) == 2
        assert "Did you mean 'runs/quickstart'?" in capsys.readouterr().err
        assert main(["runs", "--sort", "val/los"]) == 2
        assert "Did you mean 'val/loss'?" in capsys.readouterr().err
        assert main(["runs", "compare", "quickstart/one"]) == 2
        assert "takes two runs or more. Write: forge runs compare RUN RUN" in capsys.readouterr().err

    def test_what_lists_and_reports_does_not_import_torch(self, empty_folder: Path) -> None:
        for name in ("mine/one", "mine/two"):
            write_run(name, {"update": 1, "val/loss": 1.0}, card=card(1), config="data: {name: x}\n")
        verbs = [["runs"], ["runs", "compare", "one", "two"], ["report", "one"]]
        code = f"import sys; from forge.cli import main; [main(v) for v in {verbs}]; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert Path("runs/mine/one/report.html").exists()


class TestCompare:
    @pytest.fixture
    def two(self) -> None:
        def options(lr: float, keep: int) -> dict[str, Any]:
            return {
                "task": {"class": "Net", "options": {"lr": lr, "width": 8}, "parameters": 10},
                "trainer": {"max_epochs": 2, "seed": 1},
                "stack": [
                    {"name": "checkpoint", "options": {"keep": keep, "best": None}},
                    {"name": "jsonl", "options": {}},
                ],
                "versions": {"torch": "2.10", "python": "3.11"},
                "git": {"commit": "c" * 40, "branch": "main", "dirty": keep == 3},
                "device": "cpu",
            }

        one, other = options(0.1, 2), options(0.2, 3)
        other["stack"].append({"name": "clip", "options": {"max_norm": 1.0}})
        other["versions"]["torch"] = "2.11"
        lines = [{"update": 1, "val/loss": 0.4, "time": 1.0}, {"update": 2, "val/loss": 0.5, "time": 2.0}]
        write_run("mine/one", *lines, card=card(1, **one), config="data: {name: digits, batch_size: 64}\n")
        write_run(
            "mine/two",
            {"update": 4, "val/loss": 0.3, "time": 3.0},
            card=card(1, **other),
            config="data: {name: digits}\n",
        )

    @pytest.mark.usefixtures("two")
    def test_it_names_what_differs_and_nothing_else(self, capsys: Any) -> None:
        assert main(["runs", "compare", "one", "two", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["recipe"] == {
            "task.lr": [0.1, 0.2],
            "data.batch_size": [64, None],
            "checkpoint.keep": [2, 3],
            "plugin clip": [None, "yes"],
        }
        assert found["surroundings"] == {
            "torch": ["2.10", "2.11"],
            "commit": ["c" * 12, "c" * 12 + " with local changes"],
        }
        result = found["result"]
        assert (result["val/loss"], result["best val/loss"]) == ([0.5, 0.3], [0.4, 0.3])
        assert (result["updates"], result["seconds"]) == ([2, 4], [2.0, 3.0])

    @pytest.mark.usefixtures("two")
    def test_two_runs_are_shown_with_the_difference_of_their_results(self, capsys: Any) -> None:
        assert main(["runs", "compare", "one", "two"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["val/loss", "0.5", "0.3", "-0.2"] in lines
        assert ["updates", "2", "4", "+2"] in lines
        assert ["task.lr", "0.1", "0.2"] in lines


@pytest.mark.slow
def test_a_quiet_fit_prints_nothing_and_an_error_is_still_told(capsys: Any) -> None:
    small = ["quickstart", "task.hidden=8", "trainer.max_updates=2", "schedule.warmup=1", "-p", "no:tensorboard"]
    assert main(["fit", *small, "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert [run["status"] for run in listed()] == ["finished"]
    assert main(["fit", *small, "-q", "task.hiden=9"]) == 2
    assert "hiden" in capsys.readouterr().err
