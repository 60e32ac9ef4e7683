"""StoreChannel: beats, failure causes and stacks that ranks exchange through the store, without a collective."""

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
"""Separates successive runs of one process in the store; all ranks count alike."""

FAILURE = "forge/failure"
"""The key that is set in the run's store once the run has failed, for ranks that wait there for another."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat of a rank."""

    rank: int
    number: int
    host: str
    machine: str
    "The same on ranks that can see each other's processes."
    pid: int
    update: int
    where: str
    "The line that the main thread was at."
    left: bool = False
    "Whether this rank has finished its run in good order."
    sees: list[int] = field(default_factory=list)
    "Ranks whose processes are alive on this machine."
    waits: dict[str, tuple[int, str]] = field(default_factory=dict)
    "Number and name of the collective that it waits in, by group; empty while the run goes on."


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why a run failed: the first rank to fail, and the exit code of all ranks."""

    kind: str
    "raised, gone or stalled."
    rank: int
    host: str
    by: int
    "The rank that detected it."
    summary: str
    code: int = 1


class StoreChannel:
    """One rank's access to the store, by a connection of its own: another thread may be waiting on the store's."""

    def __init__(self, store: Store, rank: int):
        self.rank = rank
        self._all = store.clone()
        self._store = PrefixStore(f"forge/channel/{next(_runs)}", self._all)
        self._known: set[int] = set()

    def beat(self, beat: Beat) -> None:
        self._set(f"beat/{self.rank}", asdict(beat))

    def beats(self, ranks: Iterable[int]) -> list[Beat]:
        """Return the latest beat of each of these ranks that has begun to beat."""
        ranks = list(ranks)
        for rank in ranks:  # reading a missing key would wait for it
            if rank not in self._known and self._store.check([f"beat/{rank}"]):
                self._known.add(rank)
        known = [f"beat/{rank}" for rank in ranks if rank in self._known]
        return [Beat(**json.loads(text)) for text in self._store.multi_get(known)] if known else []

    def claim(self, cause: FailureCause) -> FailureCause:
        """Claim a cause; return the first one claimed by any rank."""
        first = FailureCause(**json.loads(self._store.compare_set("cause", "", json.dumps(asdict(cause)))))
        self._all.set(FAILURE, first.summary)
        return first

    def cause(self) -> FailureCause | None:
        """Return the first cause, or None while none is claimed."""
        found = self._get("cause")
        return FailureCause(**found) if found is not None else None

    def printed(self, done: bool = False) -> bool:
        """Return whether the cause has been printed by any rank; `done` records that it has."""
        if done:
            self._set("printed", True)
        return done or self._store.check(["printed"])

    def leave_dump(self, dump: dict[str, Any]) -> None:
        self._set(f"dump/{self.rank}", dump)

    def dump_of(self, rank: int) -> dict[str, Any] | None:
        return self._get(f"dump/{rank}")

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def machine() -> str:
    """Return a name that is equal on ranks of one machine that see each other's process ids."""
    names = [socket.gethostname()]
    for path in ("/proc/self/ns/pid", "/proc/self/ns/uts"):
        with suppress(OSError):  # only Linux has it
            names.append(os.readlink(path))
    return " ".join(names)


def process_state(pid: int) -> str:
    """Return the letter of Linux for what a process of this machine does; "" where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not."""
    state = process_state(pid)
    if state or os.path.isdir("/proc/self"):
        return state not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
