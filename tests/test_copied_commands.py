"""What one copies from a terminal of 80 columns: each command is on one line, however long, and runs as it is."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path

import pytest

from forge.cli import main
from forge.diagnose.checks.user_line import FindingWarning
from forge.tuning import batch, step_timer, workers
from forge.util import show
from forge_doctor import printed
from forge_doctor.findings import Finding
from tests.support.profiles import some

NAME = "a_task_with_a_name_that_is_much_longer_than_people_usually_choose_for_a_file"
TASK = """
import torch
import forge
from torch import nn


class Mine(forge.TaskModule):
    def __init__(self, lr: float = 0.1, note: str = ""):
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(4, 2)

    def training_step(self, batch):
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data(batch_size: int = 8, num_workers: int = 0):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=draw)
    pairs = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    loader = forge.data.Loader(pairs, batch_size=batch_size, num_workers=num_workers)
    return forge.data.Splits(train=loader, val=forge.data.Loader(pairs, batch_size=16))
"""
FIXED = ["task.note=a note of several words", "trainer.seed=1", "trainer.device=cpu", "trainer.max_epochs=1"]
WORDS = {
    "lr": ["tune", "lr", "--updates", "20"],
    "batch": ["tune", "batch", "--max", "16"],
    "workers": ["tune", "workers", "--max", "0"],
    "speed": ["tune", "speed", "--without", "compile", "--budget", "1"],
    "sweep": ["sweep", "task.lr=choice(0.1,0.5)", "--sampler", "grid", "--trials", "1", "--metric", "val/loss"],
}


@pytest.fixture(autouse=True)
def narrow(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, and measurements that take no time."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(batch, "MIN_SECONDS", 0.0)
    monkeypatch.setitem(workers.workers_range.__kwdefaults__, "seconds", 0.05)
    for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
        monkeypatch.setattr(step_timer, name, value)


@pytest.mark.parametrize("kind", some(WORDS, quick=1))
def test_a_command_to_copy_is_on_one_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "sweep":
        pytest.importorskip("optuna")
    file = f"{NAME}_{kind}.py"  # modules are kept by their name
    Path(file).write_text(TASK)
    verb, *words = WORDS[kind]
    kept = [words.pop(0)] if verb == "tune" else []
    assert main([verb, *kept, f"{file}:Mine", *words, *FIXED]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("use it")]
    assert len(line) > 80
    command = shlex.split(line.removeprefix("use it"))
    assert command[1:3] == ["fit", f"{file}:Mine"]
    assert main([*command[1:], "-q", "--run-dir", "runs/copied"]) == 0
    assert Path("runs/copied/weights.safetensors").is_file()


def test_a_cure_keeps_its_command_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = "`forge tune lr mine.py:Mine 'task.note=a note of several words'`"
    for before in range(4, 60, 7):
        printed._print_finding(Finding("unused_module", f"{'w' * before} {command}", cure=command), show.console())
        out = capsys.readouterr().out
        assert out.count(command) == 2, out
        assert max(map(len, out.splitlines())) <= 80


def test_a_finding_of_a_fit_is_one_line_without_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    with show.plain_messages():
        warnings.warn(FindingWarning("It never rises. [schedule_still]", "schedule_still"), stacklevel=1)
    assert capsys.readouterr().err == "warning: It never rises. [schedule_still]\n"
