"""One process per run folder, and the lock dies with its process."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge.errors import CheckpointError
from forge.runs import lock
from forge.runs.lock import RunLock
from tests.support import forked
from tests.support.patience import PATIENCE


def in_child(action: Callable[[], None]) -> bool:
    """Run `action` in a forked process; whether it got through without a CheckpointError."""
    child = forked.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except CheckpointError:
            code = 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 2)
    return code == 0


def can_acquire(run: Path) -> bool:
    return in_child(lambda: RunLock(run).acquire())


def test_a_second_process_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    held = RunLock(tmp_path / "run")
    held.acquire()
    assert not can_acquire(tmp_path / "run")
    held.release()
    assert can_acquire(tmp_path / "run")


def test_the_message_names_the_process_that_has_it(tmp_path: Path) -> None:
    ready, done = os.pipe(), os.pipe()
    child = forked.fork()
    if child == 0:
        try:
            RunLock(tmp_path).acquire()
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(CheckpointError, match=rf"in use by process {child} on \S+"):
            RunLock(tmp_path).acquire()
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    child = forked.fork()
    if child == 0:
        try:
            RunLock(tmp_path).acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    RunLock(tmp_path).acquire()


def test_two_locks_in_one_process_conflict(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    held = RunLock(tmp_path)
    held.acquire()
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="another run in this process"):
            RunLock(path).acquire()
    assert not can_acquire(tmp_path)  # the attempt did not drop the lock
    held.release()
    with RunLock(tmp_path):
        pass


def test_a_forked_worker_neither_has_the_lock_nor_drops_it(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    held.acquire()
    assert in_child(held.release)
    assert not in_child(held.acquire)
    assert not can_acquire(tmp_path)
    held.release()


def test_releasing_twice_or_without_a_lock_does_nothing(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    held.release()
    assert can_acquire(tmp_path)
    held.acquire()
    assert not can_acquire(tmp_path)
    held.release()
    held.release()
    assert can_acquire(tmp_path)
    held.acquire()
    assert not can_acquire(tmp_path)
    held.release()


def test_the_lock_is_let_go_when_its_block_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    assert can_acquire(tmp_path)


def fails(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_disk_error_at_the_release_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, RunLock(tmp_path):
        patch.setattr(os, "ftruncate", fails)
    assert can_acquire(tmp_path)
    assert lock.is_held(tmp_path) is False


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(CheckpointError, match=r"\.lock cannot be written: Input/output error"):
            RunLock(tmp_path).acquire()
    assert can_acquire(tmp_path)


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize("reason", ["no fcntl", "no locks on this file system"])
def test_where_nothing_can_be_locked_it_warns_once_and_goes_on(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(37, "No locks available")

    if reason == "no fcntl":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(lock.fcntl, "fcntl", refused)
    monkeypatch.setattr(lock, "_warned", [])
    with caplog.at_level(logging.WARNING, "forge"):
        for name in ("a", "b"):
            with RunLock(tmp_path / name):
                pass
    assert len(caplog.records) == 1


def test_reading_the_lock_file_does_not_drop_the_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")  # as a plugin that uploads its run does
        (tmp_path / "run" / ".lock").read_text()
        assert lock.is_held(tmp_path / "run")
        assert not can_acquire(tmp_path / "run")
    assert not lock.is_held(tmp_path / "copy")
    assert can_acquire(tmp_path / "copy")


def test_asking_for_the_status_never_refuses_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "TRIES", 1)
    with RunLock(tmp_path):
        pass
    (tmp_path / ".lock").write_text("process 1 of a killed run\n")
    asking = forked.fork()
    if asking == 0:
        try:
            while True:
                lock.is_held(tmp_path)
        finally:
            os._exit(0)
    try:
        for _ in range(150):
            held = RunLock(tmp_path)
            held.acquire()
            lock._close_in_child()  # as a kill would: the name of its process stays in the file
    finally:
        os.kill(asking, signal.SIGKILL)
        os.waitpid(asking, 0)


def test_a_forked_process_that_outlives_the_run_does_not_hold_it(tmp_path: Path) -> None:
    started, done = os.pipe(), os.pipe()
    run = forked.fork()
    if run == 0:
        try:
            RunLock(tmp_path).acquire()
            if forked.fork() == 0:  # as a data worker
                os.write(started[1], b"x")
                os.read(done[0], 1)
            else:
                os.read(started[0], 1)
        finally:
            os._exit(0)
    os.waitpid(run, 0)
    try:
        assert lock.is_held(tmp_path) is False
        assert can_acquire(tmp_path)
    finally:
        os.write(done[1], b"x")


def test_without_ofd_locks_another_kind_holds_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SET", None)
    with RunLock(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert lock.is_held(tmp_path / "run")
        assert not can_acquire(tmp_path / "run")
    assert can_acquire(tmp_path / "run")


@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_a_status_waits_for_no_pipe_and_follows_no_link(tmp_path: Path, kind: str) -> None:
    if kind == "a pipe":
        os.mkfifo(tmp_path / ".lock")
    else:
        (tmp_path / ".lock").symlink_to("/dev/zero")
    assert lock.is_held(tmp_path) in (None, False)


def test_a_lock_held_by_a_dead_runs_worker_is_waited_for(tmp_path: Path) -> None:
    """A worker that was forked a moment before its run was killed has the file open until it notices."""
    held = RunLock(tmp_path)
    held.acquire()
    descriptor = held._descriptor
    assert descriptor is not None
    dead = subprocess.Popen(["true"])
    dead.wait()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {dead.pid} on {socket.gethostname()}\n".encode(), 0)
    code = (
        "import time, types; from forge.runs import lock; from pathlib import Path\n"
        "lock.PATIENCE = 600\n"
        "def sleep(seconds): print('waits', flush=True); time.sleep(seconds)\n"
        "lock.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)\n"
        f"lock.RunLock(Path({str(tmp_path)!r})).acquire(); print('taken')"
    )
    other = forked.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    for _ in range(2 * lock.TRIES):  # more often than for a living holder
        assert other.stdout.readline() == "waits\n"
    held.release()
    assert other.communicate(timeout=PATIENCE)[0].endswith("taken\n")
