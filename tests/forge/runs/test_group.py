"""Groups: runs with one command, the same bits as each alone, continued as one; read as one row."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from forge import cli
from forge.runs.folder import RunFolder
from forge.runs.group import RunGroup, members
from forge.runs.spread import Spread, mean_curve
from forge.runs.wording import number
from forge.util import children
from tests.support import forked
from tests.support.profiles import some

TASK = """
import json, os, signal
from pathlib import Path
import torch
from forge.data import Splits
from forge.testing import TinyTask, tiny_batches


class Mine(TinyTask):
    def __init__(self, lr: float = 0.1, fails: int = -1):
        super().__init__(int(torch.randint(1000, ())), 0.5, lr)
        self.fails = fails

    def training_step(self, batch):
        order = Path("kill.json")
        here = [self.trainer.run_dir.name, self.trainer.progress.update] if self.trainer is not None else []
        if order.exists() and json.loads(order.read_text())[:2] == here:
            _, _, who, what = json.loads(order.read_text())
            order.unlink()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            os.kill(os.getppid() if who == "parent" else os.getpid(), getattr(signal, what))
            signal.sigwait([signal.SIGTERM])  # the parent passes it on
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.kill(os.getpid(), signal.SIGTERM)
        if self.trainer is not None and self.trainer.seed == self.fails:
            raise RuntimeError("this seed fails")
        return super().training_step(batch)


def data(fold: int = 0, folds: int = 5):
    batches = tiny_batches([8] * 10)
    return Splits(train=[batch for i, batch in enumerate(batches) if i % folds != fold], val=batches[fold::folds])


def whole():
    return data()
"""
FIXED = [
    "trainer.max_epochs=2",
    "checkpoint.every=2 updates",
    "checkpoint.background=false",
    "-p",
    "no:tensorboard",
    "-p",
    "no:first_look",
]
WORDS = ["fit", "mine.py:Mine", *FIXED]


@pytest.fixture(autouse=True)
def mine(empty_folder: Path) -> Path:
    (empty_folder / "mine.py").write_text(TASK)
    return empty_folder


def in_command(words: Sequence[str]) -> int:
    """The command line, whose children are forked from it."""
    subprocess.Popen = forked.Popen
    return cli.main(words)


def command(*words: str) -> forked.Completed:
    return forked.call(partial(in_command, words))


def weights(folder: str | Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in Path(folder).glob("*/weights.safetensors")}


class TestOneCommand:
    def test_seeds_are_the_runs_of_one_by_one(self) -> None:
        done = command(*WORDS, "--seeds", "0,1", "--run-dir", "g")
        assert done.returncode == 0, done.stderr
        for seed in (0, 1):
            alone = command(*WORDS, f"trainer.seed={seed}", "--run-dir", f"alone/seed-{seed}")
            assert alone.returncode == 0, alone.stderr
        assert weights("g") == weights("alone")
        assert len(set(weights("g").values())) == 2
        group = RunGroup("g")
        assert (group.status, group.progress) == ("finished", "2 finished")
        values = [RunFolder(f"alone/seed-{seed}").final["val/loss"] for seed in (0, 1)]
        assert group.final["val/loss"] == sum(values) / 2
        assert "2 finished" in done.stdout
        assert "trainer.seed=1" in group.runs[1].card["command"]

    @pytest.mark.slow
    def test_folds_are_handed_to_the_data_function(self) -> None:
        done = command(*WORDS, "trainer.seed=3", "--folds", "2", "--run-dir", "g", "--jobs", "2", "-q")
        assert done.returncode == 0, done.stderr
        for fold in (0, 1):
            words = ["trainer.seed=3", f"data.fold={fold}", "data.folds=2", "--run-dir", f"alone/fold-{fold}"]
            assert command(*WORDS, *words).returncode == 0
        assert weights("g") == weights("alone")
        assert len(set(weights("g").values())) == 2
        assert [run.card["data"] for run in RunGroup("g").runs] == [{"fold": i, "folds": 2} for i in (0, 1)]
        assert all((run.path / children.OUTPUT).is_file() for run in RunGroup("g").runs)

    @pytest.mark.parametrize(
        ("who", "what", "code"), some([("parent", "SIGKILL", -9), ("self", "SIGKILL", 1), ("parent", "SIGTERM", 85)])
    )
    def test_it_is_continued_as_one(self, who: str, what: str, code: int) -> None:
        words = [*WORDS, "--seeds", "0,1,2", "--run-dir", "cut", "-q"]
        Path("kill.json").write_text(json.dumps(["seed-1", 5, who, what]))
        gone = command(*words)
        assert gone.returncode == code, gone.stderr
        states = {run.path.name: run.status for run in RunGroup("cut").runs}
        assert (states["seed-0"], states["seed-1"] == "finished") == ("finished", False)
        first = Path("cut/seed-0/end.json").stat()
        again = command(*WORDS, "-q", "--run-dir", "cut", "--resume")
        assert again.returncode == 0, again.stderr
        assert Path("cut/seed-0/end.json").stat() == first, "what is done is left alone"
        assert RunFolder("cut/seed-1").card["resumed_from"] in (4, 6)
        assert command(*WORDS, "--seeds", "0,1,2", "--run-dir", "whole", "-q").returncode == 0
        assert weights("cut") == weights("whole")

    def test_a_run_that_fails_leaves_the_others_alone(self) -> None:
        done = command(*WORDS, "task.fails=0", "--seeds", "0,1", "-q")
        assert done.returncode == 1
        assert "1 of 2 runs failed: seed-0" in done.stderr
        (home,) = (path for path in Path("runs/mine").iterdir())
        assert RunGroup(home).progress == "1 failed, 1 finished of 2"
        assert RunGroup(home).final["val/loss"] == RunFolder(home / "seed-1").final["val/loss"]

    @pytest.mark.slow
    def test_the_newest_group_of_the_same_job_is_continued(self) -> None:
        assert command(*WORDS, "--seeds", "0", "-q").returncode == 0
        assert command(*WORDS, "--seeds", "0,1", "-q", "--resume").returncode == 0
        assert command(*WORDS, "task.lr=0.2", "--seeds", "0", "-q", "--resume").returncode == 0
        found = sorted(len(RunGroup(path).runs) for path in Path("runs/mine").iterdir())
        assert found == [1, 2]
        (two,) = (path for path in Path("runs/mine").iterdir() if len(RunGroup(path).runs) == 2)
        done = command(*WORDS, "task.lr=0.3", "--resume", str(two))
        assert "holds a group of other runs: task.lr=0.3 is not in both commands" in done.stderr

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (["--seeds", "a"], "takes whole numbers"),
            (["--seeds", "1,1"], "names a seed twice"),
            (["--seeds", "1", "trainer.seed=1"], "leave one of them out"),
            (["--seeds", "1", "--smoke"], "keeps nothing"),
            (["--seeds", "1", "--jobs", "0"], "--jobs is 0"),
            (["--seeds", "1", "task.odd=1"], "no option of task"),
            (["--jobs", "2"], "for several runs"),
            (["--folds", "1"], "two folds or more"),
            (["--seeds", "1", "--run-dir", "there"], "already holds a group"),
            (["--folds", "3", "--data", "mine.py:whole"], "'whole' takes nothing, not fold and folds"),
        ],
    )
    def test_a_mistake_is_said_before_any_run(
        self, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("there").mkdir()
        Path("there/group.json").write_text(json.dumps({"runs": {"seed-1": {"trainer.seed": 1}}}))
        assert cli.main([*WORDS, *words]) == 2
        assert why in capsys.readouterr().err
        assert not list(Path().glob("runs/*/*/*"))


def test_seeds_and_folds_make_every_pair() -> None:
    assert members([7, 8], 2)["seed-8-fold-1"] == {"trainer.seed": 8, "data.fold": 1, "data.folds": 2}
    assert len(members([7, 8], 2)) == 4


class TestSpread:
    def test_it_is_the_mean_with_its_deviation(self) -> None:
        spread = Spread({"a": 1.0, "b": 2.0, "c": 6.0}, "min")
        assert (spread, spread.n, spread.worst) == (3.0, 3, ("c", 6.0))
        assert spread.std == pytest.approx(math.sqrt(7))
        assert Spread({"a": 1.0, "b": 2.0}, "max").worst == ("a", 1.0)
        assert json.loads(json.dumps({"x": spread})) == {"x": 3.0}

    def test_few_or_lost_values_have_no_deviation(self) -> None:
        assert math.isnan(Spread({"a": 1.0}).std)
        lost = Spread({"a": 1.0, "b": math.nan}, "min")
        assert math.isnan(lost)
        assert lost.worst is not None
        assert lost.worst[0] == "b"
        assert number(lost) == "not finite"

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ((0.97, 0.98), "0.9750 ± 0.0071"),
            ((100.0, 130.0), "115 ± 21"),
            ((1e-9, 2e-9), "1.5e-09 ± 7.1e-10"),
            ((2.0, 2.0), "2 ± 0"),
        ],
    )
    def test_it_is_written_with_its_deviation(self, values: tuple[float, float], text: str) -> None:
        assert number(Spread(dict(zip("ab", values, strict=True)))) == text

    def test_curves_on_other_updates_are_read_between_their_points(self) -> None:
        mean, band = mean_curve([[(0, 0.0), (10, 10.0)], [(2, 4.0), (4, 4.0), (12, 4.0)]])
        assert mean == [(2, 3.0), (4, 4.0), (10, 7.0)]
        assert band[1] == (4, 4.0, 4.0)
        assert mean_curve([]) == ([], [])


def test_a_strangers_group_names_nothing_outside_of_it(tmp_path: Path) -> None:
    (tmp_path / "group.json").write_text(json.dumps({"runs": {"../x": {}, ".y": {}, "z": {"a": "$(b)", "c": 1}}}))
    assert RunGroup(tmp_path).members == {"z": {"c": 1}}
    (tmp_path / "group.json").write_text("[]")
    assert (RunGroup(tmp_path).members, RunGroup(tmp_path).runs, RunGroup(tmp_path).status) == ({}, [], "interrupted")
