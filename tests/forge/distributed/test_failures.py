"""A rank that raises, is killed, leaves or stalls: all ranks end non-zero and in time, and say why, once and first."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

import forge
from forge.distributed import heartbeat, stall_report
from forge.distributed.heartbeat import Heartbeat
from forge.distributed.namespace import fresh_store
from forge.distributed.stderr import is_echo
from forge.distributed.store_channel import Beat, FailureCause, StoreChannel, is_alive
from forge.errors import PeerFailed
from forge.runs.stall_clock import StallClock
from forge.util import stacks
from tests.support import forked
from tests.support.free_port import free_port
from tests.support.patience import PATIENCE, until

HOST = socket.gethostname()

TASK = """
import os, signal, sys, time
from pathlib import Path
import forge
from forge.data import Splits
from forge.testing import TinyTask, tiny_batches

RANK, WHO, HOW, AT = int(os.environ["RANK"]), int(os.environ["WHO"]), os.environ["HOW"], int(os.environ["AT"])

def fail():
    Path("failing").touch()
    if HOW == "raise":
        raise ValueError("bad luck")
    if HOW == "mistake":
        raise forge.ForgeError("a mistake of one rank")
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "leave":
        sys.exit(0)
    if HOW == "vanish":
        os._exit(0)
    if HOW == "stall":
        time.sleep(600)
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "differ":
        import torch
        torch.distributed.barrier()

class Troubled(TinyTask):
    def training_step(self, batch):
        if HOW != "hook" and RANK == WHO and self.trainer.progress.update == AT:
            fail()
        return super().training_step(batch)

    @forge.hookimpl
    def forge_step_end(self, step):
        if HOW == "hook" and RANK == WHO and step.trainer.progress.update == AT:
            Path("failing").touch()
            raise KeyError("missing")

def data():
    return Splits(train=tiny_batches([8] * 8))
"""


class Ranks:
    """Two ranks, started as srun starts them: rank 0 keeps the store, and nobody ends one because of the other."""

    def __init__(
        self,
        folder: Path,
        how: str,
        who: int = 1,
        at: int = 3,
        options: tuple[str, ...] = (),
        strategy: str = "ddp",
        task: str = TASK,
    ):
        self.folder = folder
        (folder / "troubled.py").write_text(task)
        common = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        words = [sys.executable, "-u", "-m", "forge", "fit", "troubled.py", "-p", strategy, "-p", "no:progress"]
        words += ["trainer.max_epochs=100000", "trainer.device=cpu", "--run-dir", "run", *options]
        trouble = {"HOW": how, "WHO": str(who), "AT": str(at)}
        self.output = folder / "output"
        with self.output.open("wb") as out:
            self.processes = [
                forked.Popen(
                    words,
                    cwd=folder,
                    env={**os.environ, **common, **trouble, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(2)
            ]

    def until_failing(self) -> None:
        until(lambda: (self.folder / "failing").exists() or self.processes[0].poll() is not None)

    def codes(self) -> list[int]:
        """The exit codes of all ranks, which must have ended before a collective's own limit."""
        self.until_failing()
        return [process.wait(PATIENCE) for process in self.processes]

    @property
    def text(self) -> str:
        return self.output.read_text()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Ranks] = []

    def begin(how: str, **options: Any) -> Ranks:
        started.append(Ranks(tmp_path, how, **options))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.kill()


# -- with real ranks --------------------------------------------------------------------------------------------------


def test_an_error_of_one_rank_is_first_and_ends_the_other(start: Start) -> None:
    ranks = start("raise")
    assert ranks.codes() == [1, 1]
    place = "in Troubled.training_step, at update 3, epoch 0, micro-batch 1 of 1:"
    before, cause, after = ranks.text.partition(f"rank 1 of 2 on {HOST} failed first, {place}\n")
    assert cause
    assert "rank 0:" not in before
    assert "Error" not in before
    assert after.count("Traceback") == after.count("\nValueError: bad luck") == 1
    assert after.endswith(f"\nrank 0: ended, because rank 1 on {HOST} failed first: ValueError: bad luck\n"), after


def test_a_killed_rank_is_missed_by_the_other(start: Start) -> None:
    ranks = start("kill")
    assert ranks.codes() == [1, -signal.SIGKILL]
    assert f"rank 1 of 2 on {HOST} failed first: gone (killed?): its process has ended, while rank 0" in ranks.text
    assert re.search(r"while rank 0 was at update 3; its last heartbeat came from update [0-3], in ", ranks.text)
    assert "Traceback" not in ranks.text


@pytest.mark.slow
def test_a_stall_names_the_missing_and_shows_all_stacks(start: Start) -> None:
    ranks = start("stall", options=("ddp.watchdog=3",))
    assert ranks.codes() == [1, 1]
    text = ranks.text
    assert text.count("The run has stalled") == 1
    assert "no progress for 3 s at update 3" in text
    assert "rank 1 is missing from " in text
    assert "of the group default: rank 0 is in it" in text
    waiting, sleeping = text.split("rank 0, main thread")[1].split("rank 1, main thread")
    assert "loss.backward()" in waiting
    assert "time.sleep(600)" in sleeping
    number = int(re.findall(r"number (\d+) of the group default", text)[0])
    assert re.search(rf"\nrank 0 waits in all_reduce of 99, number {number} of default, for \d+ s\.\n", text)
    assert (
        f"\nrank 1 waits in no collective; its last one was broadcast of 1, number {number - 1} of default.\n" in text
    )
    assert text.endswith("\n\nThis report, and the latest collectives of each rank: run/stall\n")
    folder = ranks.folder / "run" / "stall"
    assert (folder / "report.txt").read_text() == text[text.index("The run has stalled") :]
    for rank, behind in ((0, 0), (1, 1)):
        seen = json.loads((folder / f"rank{rank}.json").read_text())["collectives"]
        last = [entry for entry in seen if entry["process_group"][1] == "default_pg"][-1]
        assert (last["collective_seq_id"], last["retired"]) == (number - behind, bool(behind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("mistake", 2, "error: a mistake of one rank"), ("leave", 1, "exited while the other ranks go on")],
)
def test_whatever_ends_one_rank_ends_all_with_its_code(start: Start, how: str, code: int, words: str) -> None:
    ranks = start(how)
    assert ranks.codes() == [code, code]
    assert f"rank 1 of 2 on {HOST} failed first, in Troubled.training_step, at update 3" in ranks.text
    assert words in ranks.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_when_the_store_dies_the_other_rank_ends_too(start: Start, how: str) -> None:
    ranks = start(how, who=0)
    assert 0 not in ranks.codes()
    assert "failed first" in ranks.text or "the store of this run no longer answers" in ranks.text


# -- without --------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_of_two_causes_the_first_one_counts(store: TCPStore) -> None:
    channels = [StoreChannel(store, rank) for rank in range(2)]
    channels[1]._store = channels[0]._store  # one run: in a process of its own each rank counts from 0
    assert channels[0].cause() is None
    first = channels[1].claim(FailureCause("raised", 1, "b", 1, "mine"))
    assert channels[0].claim(FailureCause("raised", 0, "a", 0, "another")) == first == channels[0].cause()
    assert store.get("forge/failure") == b"mine"


def test_a_new_life_does_not_answer_to_signs_of_the_last(store: TCPStore) -> None:
    for life in range(3):
        met: dict[int, Any] = {}

        def join(rank: int, met: dict[int, Any] = met) -> None:
            met[rank] = fresh_store(store.clone(), rank, 2, timedelta(seconds=PATIENCE))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads[:: 1 if life % 2 else -1]:
            thread.start()
        for thread in threads:
            thread.join()
        assert not met[0].check(["word"])
        met[0].set("word", str(life))
        assert met[1].get("word") == str(life).encode()


def test_a_rank_that_waits_for_others_in_vain_says_so(store: TCPStore) -> None:
    with pytest.raises(forge.ForgeError, match="Rank 1 of 2 waited"):
        fresh_store(store, 1, 2, timedelta(seconds=0.1))  # limit: it expires: what is waited for never comes


def test_a_dead_process_that_nobody_has_buried_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid)
    process.wait()
    assert not is_alive(process.pid)
    assert is_alive(os.getpid())


def heartbeat_of(store: TCPStore, rank: int) -> Heartbeat:
    return Heartbeat(store, rank, 2)


def test_a_silent_rank_elsewhere_is_gone_unless_it_is_seen(store: TCPStore) -> None:
    heart = Heartbeat(store, 0, 3)

    def beat(rank: int, number: int, sees: list[int]) -> None:
        channel = StoreChannel(store, rank)
        channel._store = heart._channel._store
        channel.beat(Beat(rank, number, "far", "another machine", 1, 4, "somewhere", False, sees))

    beat(1, 1, [2])
    beat(2, 1, [1])
    assert heart._gone() is None
    heart._seen[1] = (heart._seen[1][0], time.monotonic() - 100)
    assert heart._gone() is None  # rank 2 has just been heard, and sees its process
    beat(2, 2, [])
    assert heart._gone() == 1
    beat(1, 2, [2])
    assert heart._gone() is None


def test_an_error_that_another_rank_caused_is_not_printed(store: TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    heartbeat = heartbeat_of(store, 1)
    heartbeat._channel.claim(FailureCause("raised", 0, "elsewhere", 0, "ValueError: first", 2))
    told = heartbeat.judge(RuntimeError("[gloo] Connection closed by peer"))
    assert isinstance(told, PeerFailed)
    assert (told.rank, told.code) == (0, 2)
    assert capfd.readouterr().err == ""


def test_what_a_plugin_says_of_a_lost_connection_is_its_consequence() -> None:
    def explained(error: BaseException, **how: Any) -> BaseException:
        try:
            try:
                raise error
            except type(error) as first:
                said = forge.ForgeError("the block counts its heads")
                raise said from (first if how.get("said") else None)
        except forge.ForgeError as told:
            return told

    lost = RuntimeError("[gloo] Connection closed by peer")
    assert is_echo(lost)
    assert is_echo(explained(lost, said=True))
    assert not is_echo(explained(lost))  # the plugin says that the first one does not matter
    assert not is_echo(explained(ValueError("shape is invalid"), said=True))


@pytest.mark.slow
def test_a_lost_connection_is_blamed_on_the_silent_rank(store: TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    heartbeat = heartbeat_of(store, 0)
    far = StoreChannel(store, 1)
    far._store = heartbeat._channel._store
    far.beat(Beat(1, 1, "far", "another machine", 1, 4, "somewhere"))
    told = heartbeat.judge(RuntimeError("Connection closed by peer [10.0.0.2]:1234"))
    assert isinstance(told, PeerFailed)
    text = (
        "rank 1 of 2 on far failed first: gone (killed?): it sends no heartbeat; its last heartbeat came from update 4"
    )
    assert text in capfd.readouterr().err


def test_leaving_with_0_in_the_middle_of_a_run_becomes_a_failure(store: TCPStore) -> None:
    told = heartbeat_of(store, 1).judge(SystemExit(0))
    assert isinstance(told, SystemExit)
    assert told.code == 1


def test_what_all_ranks_agreed_on_is_no_failure(store: TCPStore) -> None:
    heartbeat, leaving = heartbeat_of(store, 1), forge.Interrupted("saved")
    leaving.agreed = True
    assert heartbeat.judge(leaving) is leaving
    assert heartbeat.agreed
    assert heartbeat._channel.cause() is None


def test_the_first_update_and_a_save_may_outlast_the_watchdog(store: TCPStore) -> None:
    trainer: Any = SimpleNamespace(progress=SimpleNamespace(update=5), step=None, evaluated=0, resumed_from=5)
    heart = Heartbeat(store, 0, 2, trainer, watchdog=3)
    assert heart._stall() is None
    assert heart._limit() == 600
    trainer.step = SimpleNamespace(micro=0)
    assert heart._stall() is None
    assert heart._limit() == 600
    trainer.progress.update = 6
    assert heart._stall() is None
    assert heart._limit() == 3
    with heart.no_timeout():
        assert heart._limit() == 3600
    assert heart._limit() == 3


def test_a_clock_starts_again_with_every_micro_batch() -> None:
    clock = StallClock()
    trainer: Any = SimpleNamespace(
        progress=SimpleNamespace(update=1), step=SimpleNamespace(micro=0), evaluated=0, resumed_from=None
    )
    clock.still_for(trainer)
    clock._since -= 100
    assert clock.still_for(trainer) >= 100
    trainer.step.micro = 1
    assert clock.still_for(trainer) < 100


def dumped(groups: dict[str, Any], main: list[str] | None = None, **settings: str) -> stall_report.Dump:
    """One rank's dump."""
    position = "waits in no collective"
    words: dict[str, Any] = {"groups": groups, "position": position, "recorded": [], "settings": settings}
    return {"main": main or [], "others": {}, **words}


def test_the_report_names_the_missing_ranks_of_each_group() -> None:
    def dump(default: int, control: int) -> stall_report.Dump:
        groups = {
            "default": {"number": default, "latest": "all_reduce of 3x4"},
            "control (1)": {"number": control, "latest": ""},
        }
        return dumped(groups, main=["a.py:1 f"])

    text = stall_report.stall_report({0: dump(7, 2), 1: dump(6, 2), 2: dump(6, 2), 3: None}, "Stalled.")
    assert "ranks 1, 2 are missing from all_reduce of 3x4, number 7 of the group default: rank 0 is in it" in text
    assert "ranks 1, 2 came no further than number 6, 6." in text
    assert "control" not in text
    assert "rank 3 shows no stack" in text
    silent = stall_report.stall_report({0: dump(7, 2), 1: None}, "Stalled.", {1: "it is stopped."})
    assert silent.startswith("rank 1 does not answer: it is stopped.\nStalled.\nAll others have begun the same")
    assert "they wait for rank 1." in silent


def test_a_stopped_rank_is_what_the_report_begins_with(start: Start) -> None:
    ranks = start("stop", options=("ddp.watchdog=3",))
    ranks.until_failing()
    assert ranks.processes[0].wait(PATIENCE) == 1
    report = (ranks.folder / "run" / "stall" / "report.txt").read_text()
    stopped = ranks.processes[1].pid
    first, stalled = report.splitlines()[:2]
    assert first.startswith(f"rank 1 does not answer: its process {stopped} on {HOST} is stopped (SIGSTOP")
    assert first.endswith(f"`kill -CONT {stopped}` lets it go on.")
    assert "Troubled" not in stalled
    assert stalled.startswith("The run has stalled: rank 0")
    assert "none is missing" not in report
    assert report in ranks.text


def test_a_dump_is_plain_data_with_the_stack_of_every_thread() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="waiter")
    thread.start()
    try:
        dump = json.loads(json.dumps(stall_report.dump()))
    finally:
        go.set()
        thread.join()
    assert "test_a_dump_is_plain_data" in " ".join(dump["main"])
    assert "waiter" in dump["others"]


def test_a_stall_in_two_different_collectives_is_told_as_such() -> None:
    def rank(latest: str) -> dict[str, Any]:
        return dumped({"control": {"number": 4, "latest": latest}})

    text = stall_report.stall_report({0: rank("all_gather of 1"), 1: rank("all_reduce of 6")}, "The run has stalled.")
    assert "different collectives, number 4 of the group control: rank 0 in all_gather of 1, rank 1 in all_red" in text


def test_only_different_collectives_of_one_number_are_a_stall(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = SimpleNamespace(progress=SimpleNamespace(update=0), step=None, evaluated=0, resumed_from=None)
    heart, other, beats = Heartbeat(store, 0, 2, trainer, watchdog=60), StoreChannel(store, 1), itertools.count()
    other._store = heart._channel._store

    def told(own: Any, theirs: Any) -> str | None:
        monkeypatch.setattr(heartbeat.flight_recorder, "waits", lambda entries: own)
        other.beat(Beat(1, next(beats), HOST, "another machine", 1, 0, "somewhere", waits=theirs))
        heart._look([1])
        heart._beat()
        return heart._stall()

    one, two = {"0/0+2": (7, "all_reduce of 3")}, {"0/0+2": (7, "broadcast")}
    assert told(one, two) is None  # the run went on a moment ago
    heart._clock._since -= heartbeat.DIFFERENT + 1
    assert told(one, two) == "rank 1 wait in broadcast while it waits in all_reduce of 3 itself, at update 0"
    assert told(one, one) is None
    assert told(one, {"0/0+2": (6, "broadcast")}) is None  # rank 1 is late, and may come
    assert told(one, {"1/0+2": (7, "broadcast")}) is None
    assert told({}, two) is None


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer, as that of coverage, gives the frame a line")
def test_a_frame_in_an_instruction_of_no_line_has_a_place() -> None:
    """As where Python itself makes instructions: the heartbeat, which asks at any moment, ended there."""
    found: list[str] = []

    def between_lines() -> None:
        thread = threading.Thread(target=lambda: found.append(stacks.place()))
        thread.start()
        thread.join()

    between_lines.__code__ = between_lines.__code__.replace(co_linetable=b"")
    between_lines()
    assert f"test_failures.py:{between_lines.__code__.co_firstlineno} between_lines" in found[0]
