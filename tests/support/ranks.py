"""Several ranks in a test: forked processes that speak over gloo, or threads and pretended ranks inside this one."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from forge.env import Env
from tests.support import forked
from tests.support.patience import PATIENCE

LEFT_ALONE = 30.0
"""Seconds that ranks may go on after one of them has ended by an error."""


@contextmanager
def heard(level: int = logging.INFO) -> Iterator[list[str]]:
    """What forge logs meanwhile, in a rank, which has no caplog."""
    texts: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("forge")
    handler.emit = lambda record: texts.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def launch(world: int, function: Callable[..., Any], *arguments: Any, seconds: float = PATIENCE) -> list[int]:
    """Run `function(rank, store, *arguments)` in forked processes of one gloo group; their exit codes, by rank.

    A rank that is killed or fails is announced under the key that says so, as a failing run does it.
    """
    forked.warm_up()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = [_fork(rank, world, store.port, function, arguments) for rank in range(world)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < world:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            code = codes[children.index(child)] = os.waitstatus_to_exitcode(status)
            if code:
                store.set("forge/failure", str(code))
        elif time.monotonic() > deadline:
            for rank, pid in enumerate(children):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
            seconds, deadline = 0, time.monotonic() + PATIENCE
        else:
            time.sleep(0.01)
    return [codes[rank] for rank in range(world)]


def _fork(rank: int, world: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    child = forked.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world)
        function(rank, store, *arguments)
        code = 0
    except BaseException:
        print(f"-- rank {rank} of {world}", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def in_threads(world: int, function: Callable[[int], Any]) -> list[Any]:
    """`function(rank)` of all ranks at once; the first error is raised when all have ended, or wait for one that has
    failed. Ranks that wait for each other for good show where.

    Where this process was forked, make tensors before: torch does not do so in a thread of its own there.
    """
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        while thread.is_alive():
            thread.join(LEFT_ALONE)
            if time.monotonic() > deadline:
                faulthandler.dump_traceback()
                raise TimeoutError(f"The ranks have not ended for {PATIENCE:.0f} seconds: stderr says where they are.")
            if errors and thread.is_alive():
                thread.join(LEFT_ALONE)
                break
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(world)]


@contextmanager
def pretending(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of many, for what needs a mesh but no messages.

    Make DTensors meanwhile, but compute nothing with them: torch remembers meshes with the operations it has seen.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Pair(Env):
    """Two ranks, for what they say to each other."""

    world = 2

    @property
    def mean_rank(self) -> int:
        return dist.get_rank()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None, None]
        dist.all_gather_object(values, value)
        return values

    def all_max(self, numbers: Any) -> list[int]:
        together = torch.tensor(list(numbers))
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()
