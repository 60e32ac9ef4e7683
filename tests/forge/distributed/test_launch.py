"""`forge fit --nproc`: torch's elastic agent starts the ranks, starts them again, and answers with one exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.checkpoint import Checkpoints, StoredCheckpoint, load_weights
from forge.cli import main, ranks
from forge.distributed import worker_exit
from forge.distributed.launch import nodes
from forge.engine.signals import Signals
from forge.errors import ForgeError
from forge.testing import TinyTask, assert_same
from tests.support import forked
from tests.support.patience import PATIENCE

TASK = """
import os, signal
from pathlib import Path
from forge.data import Splits
from forge.testing import TinyTask, tiny_batches

RANK, HOW = int(os.environ.get("RANK", "0")), os.environ.get("HOW", "")

class Small(TinyTask):
    def training_step(self, batch):
        update, trouble = self.trainer.progress.update, Path("trouble")
        if RANK == 1 and update == 7 and HOW not in ("", "forever", "stubborn") and not trouble.exists():
            trouble.touch()
            if HOW == "mistake":
                raise ValueError("made once")
            os.kill(os.getpid(), getattr(signal, HOW))
        if HOW == "stubborn":
            signal.signal(signal.SIGCONT, lambda number, frame: os.kill(os.getpid(), signal.SIGSTOP))
        if HOW in ("forever", "stubborn"):
            Path(f"new-{RANK}").write_text(str(os.getpid()))
            os.replace(f"new-{RANK}", f"alive-{RANK}")
        return super().training_step(batch)

def data():
    return Splits(train=tiny_batches([8] * 8), val=tiny_batches())
"""
PLAIN = ("-p", "ddp", "-p", "no:progress", "-p", "no:tensorboard", "trainer.seed=1", "trainer.device=cpu")


@pytest.fixture(autouse=True)
def small(empty_folder: Path) -> Path:
    (empty_folder / "small.py").write_text(TASK)
    return empty_folder


Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(empty_folder: Path) -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, how: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "HOW": how, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}
        command = [sys.executable, "-m", "forge", "fit", "small.py", "--nproc", "2", *PLAIN, *words]
        started.append(
            forked.Popen(
                command,
                cwd=empty_folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, text


def await_file(path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.02)


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as one of two, by torchrun's variables."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)


def trained(run: Path) -> TinyTask:
    task = TinyTask()
    load_weights(task, run)
    return task


# -- the launch -------------------------------------------------------------------------------------------------------


def test_a_signal_to_one_rank_saves_all_at_one_update(launch: Launch, empty_folder: Path) -> None:
    words = ("trainer.max_epochs=3", "--run-dir", "run", "--max-restarts", "1")
    code, text = finished(launch(*words, how="SIGTERM"))
    assert code == 85, text
    assert text.count("SIGTERM: the state after update") == 1
    (saved,) = Checkpoints(empty_folder / "run" / "checkpoints").all()
    assert 8 <= StoredCheckpoint(saved).update < 24


STRATEGIES = {
    "ddp": (),
    "fsdp": ("-p", "no:ddp", "-p", "fsdp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_rank_restarts_and_ends_in_the_same_bits(launch: Launch, empty_folder: Path, strategy: str) -> None:
    words = ("trainer.max_epochs=2", "checkpoint.every=3 updates", *STRATEGIES[strategy])
    code, text = finished(launch(*words, "--run-dir", "straight"))
    assert code == 0, text
    assert text.count("2 epochs, 16 updates") == 1  # rank 0 alone reports
    code, text = finished(launch(*words, "--run-dir", "cut", "--max-restarts", "1", how="SIGKILL"))
    assert code == 0, text
    assert text.count("failed first: gone (killed?)") == 1
    assert text.count("Resuming from") == 1
    assert_same(trained(empty_folder / "cut"), trained(empty_folder / "straight"))


@pytest.mark.slow
def test_without_restarts_a_crash_is_1_and_is_told_once(launch: Launch) -> None:
    code, text = finished(launch("trainer.max_epochs=2", how="mistake"))
    assert code == 1
    assert text.count("\nValueError: made once") == 1
    assert "elastic" not in text


def test_a_signal_to_the_launcher_is_handed_on(launch: Launch, empty_folder: Path) -> None:
    process = launch("trainer.max_epochs=100000", "--run-dir", "run", "--max-restarts", "3", how="forever")
    for rank in range(2):
        await_file(empty_folder / f"alive-{rank}")
    process.send_signal(signal.SIGTERM)
    code, text = finished(process)
    assert code == 85, text
    assert text.count("SIGTERM: the state after update") == 1


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("forever", 85, "is stopped, and is continued so that it can end."),
        pytest.param("stubborn", 143, "is still stopped 20 s after SIGTERM, and is killed.", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_rank_does_not_keep_a_run_from_ending(
    launch: Launch, empty_folder: Path, how: str, code: int, said: str
) -> None:
    process = launch("trainer.max_epochs=100000", "--run-dir", "run", how=how)
    for rank in range(2):
        await_file(empty_folder / f"alive-{rank}")
    stopped = int((empty_folder / "alive-1").read_text())
    os.kill(stopped, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, text.count(f"rank 1 (process {stopped}) {said}")) == (code, 1), text


@pytest.mark.slow
def test_workers_end_when_their_launcher_is_killed(launch: Launch, empty_folder: Path) -> None:
    process = launch("trainer.max_epochs=100000", "--run-dir", "run", how="forever")
    for rank in range(2):
        await_file(empty_folder / f"alive-{rank}")
    process.kill()
    text, _ = process.communicate(timeout=PATIENCE)  # the workers hold the pipe until they end
    assert "the store of this run no longer answers" in text


# -- what is refused --------------------------------------------------------------------------------------------------


def test_processes_without_a_strategy_are_refused(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    assert main(["fit", "small.py", "--nproc", "2"]) == 2
    assert "Add -p ddp" in capsys.readouterr().err
    assert not (empty_folder / "runs").exists()


def test_a_worker_whose_stack_joins_nobody_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(0, monkeypatch)
    assert main(["fit", "small.py", "-p", "no:progress"]) == 2
    assert "one of 2 processes" in capsys.readouterr().err


def test_the_launcher_refuses_the_folder_of_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "small.py", "--run-dir", "run", "trainer.max_epochs=1", "-p", "no:progress"]) == 0
    assert main(["fit", "small.py", *PLAIN, "--nproc", "2", "--run-dir", "run"]) == 2
    assert "already holds the checkpoints of a run" in capsys.readouterr().err


def test_several_hosts_must_say_where_they_meet_and_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "small.py", *PLAIN, "--nproc", "2", "--nnodes", "2"]) == 2
    assert "--rdzv-endpoint HOST:PORT and --run-dir DIR" in capsys.readouterr().err


def test_numbers_of_hosts_are_one_number_or_two() -> None:
    assert nodes("2") == (2, 2)
    assert nodes("1:4") == (1, 4)
    for wrong in ("", "x", "0", "4:1", "1:x"):
        with pytest.raises(ForgeError, match="--nnodes"):
            nodes(wrong)


# -- the pieces -------------------------------------------------------------------------------------------------------


def test_a_worker_gets_the_command_less_what_concerns_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge.cli import fit
    from forge.distributed import launch as launching

    started: list[Any] = []
    monkeypatch.setattr(
        launching.Launch, "run", lambda self, words: started.append((self, words, os.environ[ranks.COMMAND])) or 0
    )
    monkeypatch.setattr(sys, "argv", ["/bin/forge", "fit", "small.py", "and so on"])
    words = ["fit", "small.py", "task.lr=0.5", "-p", "ddp", "-p", "no:jsonl", "--nproc", "4", "--max-restarts", "2"]
    assert main([*words, "--run-dir", "here", "--weights", "w.safetensors", "--trace"]) == 0
    ((launch, given, typed),) = started
    assert typed == "/bin/forge fit small.py 'and so on'"
    assert ranks.COMMAND not in os.environ
    assert (launch.nproc, launch.max_restarts) == (4, 2)
    again = fit.parser().parse_intermixed_args(given[1:])
    assert given[0] == "fit"
    assert (again.target, again.overrides, again.plugins) == ("small.py", ["task.lr=0.5"], ["ddp", "no:jsonl"])
    assert (again.nproc, again.run_dir, again.trace) == (None, str(Path("here").absolute()), True)
    assert again.weights == "w.safetensors"


def test_the_card_of_a_worker_has_the_users_command(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "what", "the", "launcher", "said"])
    monkeypatch.setenv(ranks.COMMAND, "/bin/forge fit small.py --nproc 2 'and so on'")
    assert main(["fit", "small.py", "--run-dir", "run", "trainer.max_updates=1", "-p", "no:progress", "-q"]) == 0
    card = json.loads((empty_folder / "run" / "card.json").read_text())
    assert card["command"] == "forge fit small.py --nproc 2 'and so on'"
    assert ranks.COMMAND not in os.environ


def test_only_codes_of_signals_are_hidden_from_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_exit.exit_code(85) == 85  # under torchrun and alone
    monkeypatch.setenv(worker_exit.FOLDER, str(tmp_path))
    assert [worker_exit.exit_code(code) for code in (0, 1, 2)] == [0, 1, 2]
    assert worker_exit.read_exit_code(tmp_path) is None
    assert worker_exit.exit_code(1, "below", final=True) == 0  # a restart would only repeat it
    assert worker_exit.read_exit_code(tmp_path) == 1
    assert worker_exit.exit_code(85, "saved") == 0
    assert worker_exit.read_exit_code(tmp_path) == 85


def test_of_workers_that_make_one_mistake_one_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, first in ((1, True), (0, False)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        assert worker_exit.is_first_to_fail() is first


@pytest.mark.parametrize(("restarts", "resumes"), [("0", None), ("1", "auto")])
def test_a_worker_that_is_started_again_resumes_by_itself(
    restarts: str, resumes: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import forge

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    trainer = forge.Trainer(plugins=[], run_dir="run")
    ranks.continue_own_run(trainer)
    assert trainer.resume == resumes


def test_other_ranks_than_the_first_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    from forge.util import show

    logger = logging.getLogger("forge")
    with show.plain_messages(), ranks.only_first_talks(3):
        logger.info("nobody reads this")
        logger.warning("look at %s", "this")
    assert capsys.readouterr().err.strip() == "warning: rank 3: look at this"
    assert not logger.filters


def test_of_several_ranks_the_first_alone_writes_predictions(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(1, monkeypatch)
    assert main(["predict", "quickstart", "-p", "no:progress", "trainer.device=cpu", "--out", "p.safetensors"]) == 0
    assert not (empty_folder / "p.safetensors").exists()
    assert "p.safetensors" not in capsys.readouterr().out


def test_torch_is_told_to_share_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge.distributed.launch import _environment

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with _environment(10**6, "folder"):
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_signal_from_launcher_and_scheduler_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = SimpleNamespace(
        step=object(),
        env=SimpleNamespace(world=2),
        requests=SimpleNamespace(open={}),
        progress=SimpleNamespace(update=3),
    )
    left: list[int] = []
    monkeypatch.setattr(Signals, "_leave", lambda self, number, frame: left.append(number))
    with Signals(several) as signals:  # pyright: ignore[reportArgumentType]
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert signals.received is signal.SIGTERM
        assert not left
        assert signals._at is not None
        signals._at -= 10
        signal.raise_signal(signal.SIGTERM)
        assert left == [signal.SIGTERM]
