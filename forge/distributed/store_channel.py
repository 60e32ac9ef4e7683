"""StoreChannel: what ranks tell each other through the store, without a collective: signs of life, causes, stacks."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import PrefixStore, Store

_runs = itertools.count()
"""Runs of one process, one after the other, must not read each other's words; all ranks count alike."""


FAILURE = "forge/failure"
"""The key of the run's store that is set once a run has failed: for whoever waits there for another rank."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life."""

    rank: int
    number: int
    host: str
    machine: str
    "The same on ranks that can see each other's processes."
    pid: int
    update: int
    where: str
    "What the main thread was doing."
    left: bool = False
    "Whether this rank has ended its run in good order."
    sees: list[int] = field(default_factory=list)
    "Ranks whose processes are alive on this machine."


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why a run failed: whose fault it was first, and the exit code of everybody."""

    kind: str
    "raised, gone or stalled."
    rank: int
    host: str
    by: int
    "The rank that found out."
    summary: str
    code: int = 1


class StoreChannel:
    """One rank's end. It has a connection of its own: another thread may be waiting on the store's."""

    def __init__(self, store: Store, rank: int):
        self.rank = rank
        self._all = store.clone()
        self._store = PrefixStore(f"forge/line/{next(_runs)}", self._all)
        self._heard_of: set[int] = set()

    def beat(self, beat: Beat) -> None:
        self._set(f"beat/{self.rank}", asdict(beat))

    def beats(self, ranks: Iterable[int]) -> list[Beat]:
        """The latest beat of each of these ranks that has begun to beat."""
        ranks = list(ranks)
        for rank in ranks:  # to ask for what is not there yet would wait for it
            if rank not in self._heard_of and self._store.check([f"beat/{rank}"]):
                self._heard_of.add(rank)
        known = [f"beat/{rank}" for rank in ranks if rank in self._heard_of]
        return [Beat(**json.loads(text)) for text in self._store.multi_get(known)] if known else []

    def claim(self, cause: FailureCause) -> FailureCause:
        """Name the first cause; the answer is whoever's came first."""
        first = FailureCause(**json.loads(self._store.compare_set("cause", "", json.dumps(asdict(cause)))))
        self._all.set(FAILURE, first.summary)
        return first

    def cause(self) -> FailureCause | None:
        """The first cause, once somebody has named it."""
        found = self._get("cause")
        return FailureCause(**found) if found is not None else None

    def told(self, done: bool = False) -> bool:
        """Whether the cause is on somebody's screen; `done` says that it now is."""
        if done:
            self._set("told", True)
        return done or self._store.check(["told"])

    def leave_dump(self, dump: dict[str, Any]) -> None:
        """Show the others where this rank is."""
        self._set(f"dump/{self.rank}", dump)

    def dump_of(self, rank: int) -> dict[str, Any] | None:
        return self._get(f"dump/{rank}")

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def machine() -> str:
    """What ranks on one machine that see each other's process numbers have in common."""
    names = [socket.gethostname()]
    for path in ("/proc/self/ns/pid", "/proc/self/ns/uts"):
        with suppress(OSError):  # only Linux has it
            names.append(os.readlink(path))
    return " ".join(names)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that is dead and not yet buried does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
