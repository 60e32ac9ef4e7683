"""What a run folder says of its run: how it ended, how long it took, its best; and the names by which it is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.runs.find import locate
from forge.runs.folder import RunFolder
from forge_plugins import JSONL, Checkpoint
from forge_plugins.checkpoint import Best
from tests.support.patience import PATIENCE
from tests.support.run_folders import card, write_run
from tests.support.tasks import Classifier, fit, make_batches

HOLDS = "import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDWR); fcntl.lockf(f, fcntl.LOCK_EX); print(); input()"
TRIES = "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"


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
