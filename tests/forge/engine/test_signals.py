"""A signal sets a flag; the run saves at the end of its update and exits with 85, which says: resume me."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.checkpoint import Checkpoints
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.testing import TinyTask, assert_same, tiny_batches
from forge_plugins import Accumulate, Checkpoint
from tests.conftest import Run
from tests.support import forked
from tests.support.profiles import some
from tests.support.tasks import noting

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """A process in the background may have been told to ignore SIGINT."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Shot(TinyTask):
    """Sends a signal to its own process in the middle of a window."""

    task_name = "TinyTask"  # the same job

    def __init__(self, at: int = -1, number: int = signal.SIGTERM, times: int = 1):
        super().__init__()
        self.at, self.number, self.times, self.seen = at, number, times, 0

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        if self.seen == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
        return super().training_step(batch)


def fit(folder: Path, task: forge.TaskModule, plugins: list[Any] | None = None) -> forge.FitResult:
    plugins = [Accumulate(2), Checkpoint(every=None)] if plugins is None else plugins
    options: dict[str, Any] = {"max_epochs": 3, "seed": 1, "device": "cpu", "run_dir": folder, "resume": "auto"}
    return forge.Trainer(plugins=plugins, **options).fit(task, tiny_batches(), tiny_batches(seed=1))


@pytest.mark.parametrize("number", some(SIGNALS, quick=1))
def test_a_signal_saves_and_the_resumed_run_is_bit_equal(tmp_path: Path, number: int) -> None:
    straight = TinyTask()
    fit(tmp_path / "straight", straight)
    with pytest.raises(forge.Interrupted) as caught:
        fit(tmp_path / "cut", Shot(at=7, number=number))
    assert caught.value.code == 85
    assert f"{signal.Signals(number).name}: the state after update 4 is saved" in str(caught.value)
    resumed = TinyTask()
    fit(tmp_path / "cut", resumed)
    assert_same(resumed, straight)


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(forge.Interrupted):
        fit(tmp_path, Shot(at=2))
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_run_that_nobody_saves_ends_as_the_shell_expects(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, Shot(at=2), [])
    assert not isinstance(caught.value, forge.Interrupted)
    assert caught.value.code == 128 + signal.SIGTERM


def test_a_signal_in_the_last_update_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(forge.Interrupted):  # there may be another fit after this one
        fit(tmp_path, Shot(at=15))
    assert (tmp_path / "weights.safetensors").exists()
    assert fit(tmp_path, TinyTask()).epochs == 3


def test_a_save_that_failed_is_not_said_to_have_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, Shot(at=7), [Checkpoint(every=None, on_failure="warn")])
    assert not isinstance(caught.value, forge.Interrupted)


def test_a_fit_in_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    look, during = noting("boundary", lambda: signal.getsignal(signal.SIGTERM))
    thread = threading.Thread(target=lambda: fit(tmp_path, TinyTask(), [look]))
    thread.start()
    thread.join()
    assert set(during) == {before}


def test_a_signal_that_the_process_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert fit(tmp_path, Shot(at=2, number=signal.SIGUSR1)).epochs == 3
    finally:
        signal.signal(signal.SIGUSR1, before)


# -- in a process of its own ------------------------------------------------------------------------------------------


def shot_in(folder: Path, times: int = 1, stderr: bool = True) -> None:
    """A script: it trains, and is sent SIGTERM in its seventh update."""
    if not stderr:
        os.close(2)
    fit(folder, Shot(at=7, times=times), [Checkpoint(every="2 updates")])


def test_a_closed_stderr_does_not_keep_a_signal_from_saving(tmp_path: Path) -> None:
    done = forked.call(partial(shot_in, tmp_path, stderr=False))
    assert done.returncode == 85
    assert not done.stderr
    assert Checkpoints(tmp_path / "checkpoints").all()


def test_a_second_signal_ends_at_once_with_a_whole_save(tmp_path: Path) -> None:
    done = forked.call(partial(shot_in, tmp_path, times=2))
    assert done.returncode == -signal.SIGTERM, done.stderr
    saved = Checkpoints(tmp_path / "checkpoints").all()
    assert saved[-1].name in ("update-00000004", "update-00000006")
    for path in saved:
        SavedState(path).verify()


def test_the_command_line_says_how_to_go_on(run_forge: Run, empty_folder: Path) -> None:
    (empty_folder / "shot.py").write_text(TASK)
    done = run_forge("fit", "shot.py:Shot", "trainer.seed=1", "--run-dir", "run", "-p", "checkpoint")
    assert done.returncode == 85, done.stderr
    assert "continue with --resume" in done.stderr
    again = run_forge("fit", "shot.py:Shot", "trainer.seed=1", "--run-dir", "run", "-p", "checkpoint", "--resume")
    assert again.returncode == 0, again.stderr


TASK = """
import os, signal
from forge.data import Splits
from forge.testing import TinyTask, tiny_batches

class Shot(TinyTask):
    seen = 0
    def training_step(self, batch):
        self.seen += 1
        if self.seen == 7 and self.trainer.progress.update < 7 and self.trainer.resumed_from is None:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch)

def data():
    return Splits(train=tiny_batches())
"""
