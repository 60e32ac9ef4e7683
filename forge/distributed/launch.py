"""Launch: start the ranks of a run with torch's elastic agent, inside this process.

Every worker is a command with torchrun's variables. When one fails, the agent ends the others, and restarts all of them
while restarts are left; not after a signal, nor after a ForgeError, which a restart would only repeat.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from forge.distributed import worker_exit
from forge.distributed.address import own_address
from forge.distributed.stderr import write
from forge.errors import ForgeError
from forge.util.signal_waits import ECHO, NAMES

MISTAKE = 2
"""The exit code of a worker that raised a ForgeError."""
ROLE = "forge"
NODE_RANK = "FORGE_NODE_RANK"
"""The environment variable by which `forge launch` numbers its nodes: the first holds the rendezvous, whatever the
names of the hosts resolve to."""
STOPPED_LIMIT = 20.0
"""Seconds after a signal for a stopped worker to continue and end; then it is killed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How many ranks to start, where they rendezvous, and how often they restart."""

    nproc: int
    max_restarts: int = 0
    nodes: tuple[int, int] = (1, 1)
    "The least and the largest number of hosts; each runs the same command."
    endpoint: str = "localhost:0"
    "HOST:PORT of the rendezvous; port 0 picks a free one, for a single host."

    def run(self, words: Sequence[str]) -> int:
        """Run `python -m forge WORDS` on every rank, and return one exit code for all."""
        _quieten()
        with tempfile.TemporaryDirectory(prefix="forge-launch-") as folder, _environment(self.nproc, folder):
            agent = Agent(self._spec(words), DefaultLogsSpecs(log_dir=folder))
            try:
                with agent.forwarding():
                    result: RunResult | None = agent.run()  # pyright: ignore[reportAssignmentType]
            except SignalException as error:
                return 128 + error.sigval
            finally:
                if self.nodes[1] > 1:  # a single host would only wait for its own last heartbeat
                    agent.spec.rdzv_handler.shutdown()
            return self._code(result, agent, Path(folder))

    def _spec(self, words: Sequence[str]) -> WorkerSpec:
        least, most = self.nodes
        here = "localhost" if most == 1 else own_address(self.endpoint)
        number = os.environ.get(NODE_RANK) if most > 1 else None
        rendezvous = RendezvousParameters(
            backend="c10d",
            endpoint=self.endpoint,
            run_id=ROLE if most > 1 else str(uuid.uuid4()),
            min_nodes=least,
            max_nodes=most,
            local_addr=here,
            timeout=900,
            **({} if number is None else {"is_host": number == "0"}),
        )
        return WorkerSpec(
            role=ROLE,
            local_world_size=self.nproc,
            rdzv_handler=registry.get_rendezvous_handler(rendezvous),
            entrypoint=sys.executable,
            args=("-u", "-m", "forge", *words),
            max_restarts=self.max_restarts,
            monitor_interval=0.1,
            local_addr=here,
        )

    @staticmethod
    def _code(result: RunResult | None, agent: Agent, folder: Path) -> int:
        left = worker_exit.read_exit_code(folder)
        if left is not None:
            return left
        if result is None or not result.is_failed():  # none: the hosts agreed to end
            return 0
        if agent.received is not None:
            return 128 + agent.received
        codes = {failure.exitcode for failure in result.failures.values()}
        return MISTAKE if MISTAKE in codes else 1


class Agent(LocalElasticAgent):
    """torch's agent for the workers of one host. It forwards signals to the workers, and never restarts after one."""

    received: signal.Signals | None = None
    _received_at = 0.0
    _continued: set[int]
    """Workers that were stopped, and continued so that they can end."""

    @property
    def spec(self) -> WorkerSpec:
        return self._worker_group.spec

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Forward signals to the workers, which save and exit by themselves, however long it takes."""
        before: dict[int, Any] = {}
        for name in NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None and time.monotonic() - self._received_at > ECHO
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
        if self._pcontext is None:
            raise SignalException(f"{self.received.name} before the first worker was started", self.received)
        for pid in self._pcontext.pids().values():
            with suppress(ProcessLookupError):
                # a second signal kills: a worker that waits for another rank handles nothing less
                os.kill(pid, signal.SIGKILL if again else number)
        self._continued = set()
        self._wake_stopped()

    def _wake_stopped(self) -> None:
        """Continue each worker that SIGSTOP or a debugger has stopped, since no other signal reaches it; kill it if it
        is stopped when its time is over."""
        assert self.received is not None
        pids = self._pcontext.pids() if self._pcontext is not None else {}
        is_late = time.monotonic() - self._received_at > STOPPED_LIMIT
        for local, pid in pids.items():
            if not is_stopped(pid) or (pid in self._continued and not is_late):
                continue
            self._continued.add(pid)
            said = "is stopped, and is continued so that it can end"
            if is_late:
                said = f"is still stopped {STOPPED_LIMIT:g} s after {self.received.name}, and is killed"
            write(f"rank {self._worker_group.workers[local].global_rank} (process {pid}) {said}.")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGCONT)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.received is not None:
            self._wake_stopped()  # again: a process with many threads is seen as stopped some time after SIGSTOP
        result: RunResult = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue, reportAssignmentType]
        failed = result.state is WorkerState.FAILED
        if failed and (self.received is not None or any(f.exitcode == MISTAKE for f in result.failures.values())):
            self._remaining_restarts = 0
        return result


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; never on systems without /proc."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def nodes(text: str) -> tuple[int, int]:
    """Parse "2" or "1:4" into the least and the largest number of hosts."""
    least, _, most = text.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 1 <= int(least) <= int(most or least):
        raise ForgeError(f"--nnodes {text}: give a number of hosts, or the least and the largest as 1:4.")
    return int(least), int(most or least)


@contextmanager
def _environment(nproc: int, folder: str) -> Iterator[None]:
    """Set the environment of the workers: each gets its share of the cores, and C++ code logs no stacks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    os.environ[worker_exit.FOLDER] = folder
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _quieten() -> None:
    """Silence the agent's log, which repeats the workers' messages."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
