"""Ranks that last: processes that serve one test after the other, because starting one takes longer than most tests.

    ranks(2)(function, *arguments)      the function's result on each of two ranks, in order

The function is importable by name and finds torchrun's variables in its environment. What a rank raises is raised here,
with the traceback that it had there.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import socket
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.support.forked import FORKS, warm_up

LIMIT = 60.0
"""Seconds that a call may take before its ranks show where they are and are killed."""


class Ranks:
    """`count` processes, started at the first call."""

    def __init__(self, count: int):
        self.count = count
        self._workers: list[tuple[Any, Connection]] = []

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
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers):
            pipe.send((function, arguments, variables(rank, self.count, port)))
        try:
            return [self._answer(pipe) for _, pipe in self._workers]
        except BaseException:
            self.stop()
            raise

    def _answer(self, pipe: Connection) -> tuple[str, Any]:
        if not pipe.poll(LIMIT + 10):
            raise TimeoutError(f"A rank has not answered for {LIMIT:.0f} seconds.")
        return pipe.recv()

    def _start(self) -> None:
        warm_up()
        context = get_context("fork" if FORKS else "spawn")
        for _ in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=False)  # it may have workers
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def stop(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []


@cache
def ranks(count: int) -> Ranks:
    made = Ranks(count)
    atexit.register(made.stop)
    return made


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _serve(pipe: Connection, parent: int) -> None:
    gc.freeze()  # or a collection would copy all memory
    torch.set_num_threads(1)
    while True:
        try:
            while not pipe.poll(1):  # other ranks may hold the pipe open when this process's parent is gone
                if os.getppid() != parent:
                    return
            function, arguments, environment = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        faulthandler.dump_traceback_later(LIMIT)
        try:
            pipe.send(("returned", function(*arguments)))
        except BaseException as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            pipe.send(("raised", (f"{type(error).__name__}: {error}{notes}", traceback.format_exc())))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
