"""forge runs: every run with its result, and an honest word on how it ended."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli import main
from forge.runs.find import locate
from forge.runs.folder import RunFolder
from forge_plugins import JSONL, Checkpoint
from forge_plugins.checkpoint import Best
from tests.support.patience import PATIENCE
from tests.support.tasks import Classifier, fit, make_batches

HOLDS = "import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDWR); fcntl.lockf(f, fcntl.LOCK_EX); print(); input()"
TRIES = "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def write_run(name: str, *lines: dict[str, Any], end: Any = None, card: Any = None, config: str = "") -> Path:
    """A run folder under runs/."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for stem, content in (("card", card), ("end", end)):
        if content is not None:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


def card(day: int, **more: Any) -> dict[str, Any]:
    return {"started": f"2026-01-{day:02} 12:00:00 +0000", "recipe": "mine", "task": {"class": "Net"}, **more}


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process works in the run folder."""
    (folder / ".lock").write_text("process 1 on elsewhere\n")
    words = [sys.executable, "-c", HOLDS, str(folder / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate("\n", timeout=PATIENCE)


def listed(*words: str) -> list[dict[str, Any]]:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["runs", *words, "--json"]) == 0
    return json.loads(out.getvalue())


class TestStatus:
    """Of a fit that ended, running, killed or in other hands."""

    def test_it_is_what_the_end_says(self) -> None:
        for status in ("finished", "interrupted", "failed"):
            assert RunFolder(write_run(status, end={"status": status, "reason": "why"})).status == status

    def test_it_runs_while_a_process_holds_its_folder(self) -> None:
        folder = write_run("a/b", end={"status": "finished"})
        with held(folder):
            assert RunFolder(folder).status == "running"
        assert RunFolder(folder).status == "finished"

    def test_a_killed_process_leaves_a_free_lock_and_no_end(self) -> None:
        folder = write_run("a/b", {"update": 3}, card=card(1))
        (folder / ".lock").write_text("process 1 on elsewhere\n")
        assert RunFolder(folder).status == "killed"

    def test_to_ask_from_within_the_run_does_not_let_go_of_its_lock(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        @forge.on("boundary")
        def look(trainer: forge.Trainer) -> None:
            seen.append(RunFolder(tmp_path).status)
            tried = subprocess.run([sys.executable, "-c", TRIES, str(tmp_path / ".lock")], capture_output=True)
            seen.append(tried.returncode)

        fit(max_updates=1, plugins=[JSONL(), look], run_dir=tmp_path)
        assert seen == ["running", 1]
        assert RunFolder(tmp_path).status == "finished"

    def test_a_stop_by_a_plugin_is_a_finish_with_its_reason(self, tmp_path: Path) -> None:
        @forge.on("step_end")
        def stop(step: forge.Step) -> None:
            step.trainer.request_stop("enough")

        fit(plugins=[JSONL(), stop], run_dir=tmp_path)
        assert (RunFolder(tmp_path).status, "enough" in RunFolder(tmp_path).reason) == ("finished", True)


class TestReadingBack:
    def test_time_is_the_sum_over_the_lives_of_a_run(self) -> None:
        lines = [{"update": i, "time": t} for i, t in ((1, 2.0), (2, 5.0), (3, 1.0), (4, 4.0))]
        assert RunFolder(write_run("a/b", *lines, end={"seconds": 4.5}, card=card(1, resumed_from=2))).seconds == 9.5

    def test_a_test_that_came_after_the_end_is_among_the_metrics(self, tmp_path: Path) -> None:
        fit(val=make_batches(1), plugins=[JSONL()], run_dir=tmp_path)
        result = forge.Trainer(plugins=[JSONL()], run_dir=tmp_path, device="cpu").test(Classifier(), make_batches(1))
        end = (tmp_path / "end.json").stat()
        os.utime(tmp_path / "metrics.jsonl", ns=(end.st_atime_ns, end.st_mtime_ns))  # clocks of files are coarse
        final = RunFolder(tmp_path).final
        assert final["test/loss"] == result["test/loss"]
        assert "val/loss" in final

    def test_the_best_is_what_the_checkpoint_best_was_kept_for(self, tmp_path: Path) -> None:
        scores = iter([1.0, 3.0, 2.0])

        class Scripted(Classifier):
            def evaluation_end(self, stage: str) -> dict[str, Any]:
                return {"points": next(scores)}

        plugins = [JSONL(), Checkpoint(best=Best(monitor="val/points", mode="max"))]
        fit(Scripted(), val=make_batches(1), max_epochs=3, plugins=plugins, run_dir=tmp_path)
        best = RunFolder(tmp_path).best
        assert best is not None
        assert (best.monitor, best.mode, best.update, best.value) == ("val/points", "max", 8, 3.0)
        marks = {checkpoint.update: checkpoint.marks for checkpoint in RunFolder(tmp_path).checkpoints}
        assert marks == {8: ("best",), 12: ("latest",)}


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


class TestNames:
    def test_a_run_is_known_by_path_group_and_part_of_its_name(self) -> None:
        old, new = write_run("mine/2026-aa", card=card(1)), write_run("mine/2026-bb", card=card(2))
        assert locate(str(old)).path == old
        assert locate("runs/mine").path == new
        assert locate("mine/2026-aa").path == old
        assert locate("bb").path == new

    def test_an_unknown_run_is_answered_with_the_nearest_name(self) -> None:
        for name in ("first", "mine/2026-aa"):
            write_run(name, card=card(1))
        for written, meant in (("frist", "first"), ("runs/frist", "first"), ("2026-ab", "mine/2026-aa")):
            with pytest.raises(forge.ForgeError, match=f"There is no run '{written}'. Did you mean '{meant}'?"):
                locate(written)
        with pytest.raises(forge.ForgeError, match=r"Known: first, mine/2026-aa\."):
            locate("zebra")

    def test_a_name_for_two_is_refused(self) -> None:
        for name in ("2026-aa", "2026-ab"):
            write_run(f"mine/{name}", card=card(1))
        with pytest.raises(forge.ForgeError, match=r"matches 2 runs: .*mine/2026-a.* Write more"):
            locate("2026")


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
