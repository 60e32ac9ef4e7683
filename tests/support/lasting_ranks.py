"""Ranks that last: processes that serve one test after the other, because starting one takes longer than most tests.

    ranks(2)(function, *arguments)      the function's result on each of two ranks, in order

The function is importable by name and finds torchrun's variables in its environment. What a rank raises is raised here,
with the traceback that it had there.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import current_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from tests.support import forked
from tests.support.free_port import free_port

MANY = 100
"""Threads of a rank from which on it is replaced: torch keeps the groups of every test, and each has three."""
LIMIT = 300.0
"""Seconds that a call may take before its ranks show where they are and are killed."""
LINUX = sys.platform == "linux"
ROOT = Path(__file__).resolve().parents[2]
DEATH = 1
"""prctl's PR_SET_PDEATHSIG."""
KEY = "FORGE_TESTS_AUTHKEY"
"""The variable with the key of this process: memory of tensors is shared only with processes that have it."""


class Ranks:
    """`count` processes, started at the first call."""

    def __init__(self, count: int):
        self.count = count
        self._workers: list[tuple[subprocess.Popen[bytes], Connection, Connection]] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        outcomes = self.outcomes(function, *arguments)
        for kind, value in outcomes:
            if kind == "raised":
                raise AssertionError(f"A rank raised:\n{value[1]}")
        return [value for _, value in outcomes]

    def errors(self, function: Callable[..., Any], *arguments: Any) -> list[str]:
        """What each rank raised, as "Class: message"; "" where it raised nothing."""
        return [value[0] if kind == "raised" else "" for kind, value in self.outcomes(function, *arguments)]

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        if not self._workers:
            self._start()
        self._signal(signal.SIGCONT)
        port = free_port()
        for rank, (_, to, _) in enumerate(self._workers):
            to.send((function, arguments, variables(rank, self.count, port)))
        try:
            outcomes = [self._answer(answers) for _, _, answers in self._workers]
        except BaseException:
            self.stop()
            raise
        if any(threads(process.pid) > MANY for process, *_ in self._workers):
            self.stop()
        self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: signal.Signals) -> None:
        """Let them run, or rest until the next call: threads of gloo wake a hundred times a second for nothing."""
        if LINUX:
            for process, *_ in self._workers:
                process.send_signal(number)

    def _answer(self, answers: Connection) -> tuple[str, Any]:
        if not answers.poll(LIMIT + 10):
            raise TimeoutError(f"A rank has not answered for {LIMIT:.0f} seconds.")
        return answers.recv()

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment[KEY] = current_process().authkey.hex()
        for _ in range(self.count):
            command = [sys.executable, "-c", "from tests.support.lasting_ranks import serve; serve()"]
            process = forked.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin is not None
            assert process.stdout is not None
            to = Connection(os.dup(process.stdin.fileno()), readable=False)
            self._workers.append((process, to, Connection(os.dup(process.stdout.fileno()), writable=False)))

    def stop(self) -> None:
        for process, *_ in self._workers:
            process.kill()
            process.wait()
        self._workers = []


@cache
def ranks(count: int) -> Ranks:
    made = Ranks(count)
    atexit.register(made.stop)
    return made


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task")) if LINUX else 0


def variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def serve() -> None:
    """Be one rank: calls come on stdin, results leave on stdout, and what is printed goes to stderr."""
    if LINUX:
        ctypes.CDLL(None).prctl(DEATH, signal.SIGKILL, 0, 0, 0)  # who rests does not notice that nobody calls any more
    current_process().authkey = bytes.fromhex(os.environ.pop(KEY))
    calls, results = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, environment = calls.recv()
        except EOFError:
            return
        os.environ.update(environment)
        faulthandler.dump_traceback_later(LIMIT)
        try:
            outcome = ForkingPickler.dumps(("returned", function(*arguments)))
        except BaseException as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            said = f"{type(error).__name__}: {error}{notes}"
            outcome = ForkingPickler.dumps(("raised", (said, traceback.format_exc())))
        faulthandler.cancel_dump_traceback_later()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        results.send_bytes(outcome)
