"""forge sweep: trials in processes of their own, which die with it, and go on with it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge import cli
from forge.runs.find import runs_in
from forge.runs.lock import is_held
from tests.support.patience import PATIENCE, until

pytest.importorskip("optuna")
TASK = """
import os, signal, time
from pathlib import Path
import torch
import forge
from torch import nn


class Mine(forge.TaskModule):
    def __init__(self, lr: float = 0.1, dies: float = 2.0, slow: bool = False):
        super().__init__()
        self.lr, self.dies, self.slow = lr, dies, slow
        self.net = nn.Linear(4, 2)

    def training_step(self, batch):
        if self.lr > self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.slow and self.trainer is not None:
            here = f"{self.trainer.run_dir.name}-{self.trainer.progress.update}"
            while here == "trial-0001-5" and Path("wait").exists():
                Path("waits").touch()
                time.sleep(0.01)
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data():
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=draw), torch.randint(0, 2, (8,), generator=draw)) for _ in range(6)]
    return forge.data.Splits(train=batches[:4], val=batches[4:])
"""
FIXED = ["trainer.max_epochs=3", "trainer.seed=1", "checkpoint.every=2 updates", "-p", "no:tensorboard"]
WORDS = ["sweep", "mine.py:Mine", "task.lr=choice(0.5,0.1)", *FIXED, "--metric", "val/loss", "--sampler", "grid"]


@pytest.fixture(autouse=True)
def mine(empty_folder: Path) -> Path:
    (empty_folder / "mine.py").write_text(TASK)
    return empty_folder


@pytest.mark.slow
def test_a_trial_is_a_fit_of_its_own_and_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--trials", "1", "--dir", "s"]) == 0
    said = capsys.readouterr()
    assert "trial 0     complete  val/loss" in said.err
    (run,) = runs_in("s")
    assert run.status == "finished"
    command = shlex.split(run.card["command"])
    assert command[:3] == ["forge", "fit", "mine.py:Mine"]
    assert "task.lr=0.5" in command
    assert command[-3:-1] == ["--run-dir", str(Path("s/trial-0000").absolute())]
    value = run.final["val/loss"]
    use = re.search(r"^use it +(.*)$", said.out, flags=re.MULTILINE)
    assert use is not None
    assert cli.main([*shlex.split(use[1])[1:], "--run-dir", "again"]) == 0
    assert runs_in("again")[0].final["val/loss"] == value


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["quickstart", "task.lr=log(1e-4,1)", "--metric", "odd"], "add --mode max or --mode min"),
        (
            ["quickstart", "task.rate=log(1e-4,1)", "--metric", "val/loss"],
            "task.rate (command line) is no option of task",
        ),
        (["quickstart", "task.lr=log(1e-4,1)", "--metric", "val/loss", "--jobs", "0"], "--jobs is 0"),
        (["quickstart", "task.lr=log(1e-4,1)", "--metric", "val/loss", "--trials", "-1"], "--trials is -1"),
    ],
)
def test_a_mistake_is_said_before_any_trial(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", *words]) == 2
    assert why in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_an_option_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sweep", "quickstart", "task.lr=log(1e-4,1)"])
    said = capsys.readouterr().err
    assert "it wants --metric, what to optimise" in said
    assert "RECIPE" not in said


def test_a_trial_that_is_killed_is_a_failure_of_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "task.dies=0.3", "--dir", "s", "--jobs", "2"]) == 0
    said = capsys.readouterr()
    assert "killed by SIGKILL" in said.err
    assert "1 complete, 1 fail" in said.out


def start(*words: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "forge", *WORDS, "--dir", "s", *words],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_sweep_and_its_trials_end_and_go_on_together(how: signal.Signals) -> None:
    Path("wait").touch()
    sweep = start("task.slow=true")
    try:
        until(Path("waits").exists)
        sweep.send_signal(how)
        if how is not signal.SIGKILL:
            Path("wait").unlink()  # the trial ends its update, saves and leaves
        out, _ = sweep.communicate(timeout=PATIENCE)
    finally:
        sweep.kill()
    assert sweep.returncode == (-how if how is signal.SIGKILL else 85), out
    until(lambda: not is_held(Path("s/trial-0001")))
    Path("wait").unlink(missing_ok=True)
    again = start("task.slow=true")
    out, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, out
    assert "2 complete" in out
    runs = {run.path.name: run for run in runs_in("s")}
    saved = 4 if how is signal.SIGKILL else 6
    assert runs["trial-0001"].card["resumed_from"] == saved
    assert runs["trial-0000"].card["resumed_from"] is None
