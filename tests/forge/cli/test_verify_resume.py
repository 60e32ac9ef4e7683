"""forge verify-resume: what it finds in a user's own file, and what one life of a run does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from forge.checkpoint import Checkpoints
from forge.cli import main, verify_resume
from forge.snapshot.evidence import UNSAVED, attempts_apart, read_traces
from tests.conftest import Run
from tests.support.profiles import some

TASK = """
import torch
from torch import nn
import torch.nn.functional as F
import forge
from forge.data import Loader, Splits

class Counts(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.count = 0

    def training_step(self, batch):
        x, y = batch
        self.count += 1
        return F.cross_entropy(self.net(x), y) / self.count

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Drifts(Counts):
    def training_step(self, batch):
        x, y = batch
        self.count += 1
        return F.cross_entropy(self.net(x), y)

class Sound(Counts):
    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Splits(train=Loader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 4, shuffle=True))
"""


@pytest.fixture
def file(empty_folder: Path) -> Path:
    path = empty_folder / f"task_{empty_folder.name}.py"  # modules are kept by their name
    path.write_text(TASK)
    return path


def live(target: str, folder: Path, *words: str) -> int:
    """One life, in this process."""
    given = [target, "--life", str(folder), "--updates", "8", "--every", "2", "-p", "no:progress", *words]
    folder.mkdir(exist_ok=True)
    return verify_resume.run(verify_resume.parser().parse_intermixed_args(given))


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = os.kill

    def play(pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            raise Killed
        kill(pid, number)

    monkeypatch.setattr(os, "kill", play)


# -- one life ---------------------------------------------------------------------------------------------------------


def test_a_life_leaves_a_trace_and_checkpoints_at_its_interval(file: Path, tmp_path: Path) -> None:
    assert live(f"{file}:Sound", tmp_path / "a") == 0
    assert [record.updates for record in read_traces(tmp_path / "a")] == [list(range(1, 9))]
    assert [path.name for path in Checkpoints(tmp_path / "a" / "run" / "checkpoints").all()][-1] == "update-00000008"


def test_without_a_seed_of_its_own_two_lives_begin_alike(file: Path, tmp_path: Path) -> None:
    for name in "ab":
        live(f"{file}:Sound", tmp_path / name)
    (a,), (b,) = (read_traces(tmp_path / name) for name in "ab")
    assert len(a.updates) == 8
    assert a.marks == b.marks


@pytest.mark.usefixtures("no_kill")
@pytest.mark.parametrize(("task", "kind"), some([("Counts", UNSAVED), ("Sound", None), ("Drifts", UNSAVED)], quick=1))
def test_a_second_life_goes_on_from_the_newest_checkpoint(
    file: Path, tmp_path: Path, task: str, kind: str | None
) -> None:
    live(f"{file}:{task}", tmp_path / "straight")
    with pytest.raises(Killed):
        live(f"{file}:{task}", tmp_path / "killed", "--kill-at", "5")
    live(f"{file}:{task}", tmp_path / "killed")
    (straight,), killed = (read_traces(tmp_path / name) for name in ("straight", "killed"))
    assert [record.updates for record in killed] == [[1, 2, 3, 4, 5], [5, 6, 7, 8]]
    difference = attempts_apart(straight, killed)
    assert (difference.kind if difference else None) == kind
    if difference is not None:
        assert (difference.update, difference.path) == (5, "task.count")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "code", "said"),
    [
        (
            "Counts",
            1,
            r"Not the same\. First difference at update \d+, in a value outside the task's state \(task.count\)",
        ),
        ("Drifts", 1, r"Not the same: what no checkpoint holds has drifted\. .* It has not shown in the batches"),
        ("Sound", 0, r"Bit for bit the same: 8 updates\. Killed after update "),
    ],
)
def test_what_was_found_is_told(run_forge: Run, file: Path, task: str, code: int, said: str) -> None:
    done = run_forge("verify-resume", f"{file}:{task}", "--updates", "8", "--kills", "1", "--keep", "kept")
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Uninterrupted run: 8 updates ..."
    assert [line.partition(":")[0] for line in lines[1:3]] == [f"Killed run, attempt {i} of 2" for i in (1, 2)]
    assert re.search(said, done.stdout)
    assert ("register_buffer" in done.stdout) == (task != "Sound")
    assert {path.name for path in (file.parent / "kept").iterdir()} == {"straight", "killed"}


def test_a_folder_to_keep_that_is_in_use_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *words, **more: pytest.fail("a life began"))
    (tmp_path / "old").write_text("")
    for given, said in ((tmp_path, "is not empty"), (tmp_path / "old", "is a file")):
        assert main(["verify-resume", "quickstart", "--keep", str(given)]) == 2
        err = capsys.readouterr().err
        assert f"'{given}'" in err
        assert said in err
