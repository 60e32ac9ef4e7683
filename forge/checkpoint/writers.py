"""The ranks that write one checkpoint, coordinated through the store.

No collective is used: a save runs in a background thread on every rank while the main threads train. Each save has its
own keys in the store. Rank 0 announces the directory, each rank reports its files, rank 0 announces the outcome.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import CheckpointError, StackError

if TYPE_CHECKING:
    from torch.distributed import Store

    from forge.checkpoint.readers import HasRank

PATIENCE = 1800.0
"""Seconds that rank 0 waits for the slowest rank after writing its own files."""
GRACE = 3.0
"""Seconds that a write may continue after the run has failed on some rank."""
LONGEST_PAUSE = 0.2


def failure(target: Path, why: str) -> str:
    why = why.removesuffix(".")
    return f"The checkpoint {target} could not be written: {why}. No part of it remains; earlier ones are untouched."


@dataclass(frozen=True, slots=True)
class Writers:
    """All ranks that write a checkpoint, seen from one of them."""

    rank: int
    world: int
    store: Store
    failure_key: str = "forge/failure"
    "A failed rank sets this key, so that the others stop waiting for it."

    @classmethod
    def of(cls, env: HasRank) -> Writers | None:
        """Return the ranks that save together; None for a single process."""
        if env.world == 1:
            return None
        if env.store is None:
            raise StackError(
                f"{env.world} ranks save their state together through a torch.distributed Store, but the Env of this "
                "run's strategy has none. Set its `store`."
            )
        return cls(env.rank, env.world, env.store)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def reconnected(self) -> Writers:
        """Return a copy with its own connection, for a thread: a wait blocks a shared connection."""
        return replace(self, store=self.store.clone())


class SharedSave:
    """One save. Every rank makes one for each save, in the same order, and calls `leave` in any case."""

    def __init__(self, writers: Writers, target: Path):
        self.writers, self.target = writers, target
        number = writers.store.add(f"forge/checkpoint/begun/{writers.rank}", 1)
        self._key = f"forge/checkpoint/{number}/{target.name}"

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def announce(self, folder: str) -> None:
        """Announce the directory, beside the target, for all files."""
        self._set("folder", folder)

    def reports(self) -> list[dict[str, Any]]:
        """Wait for all ranks, then return their reports by rank."""
        store, world = self.writers.store, self.writers.world
        self._await(lambda: store.add(f"{self._key}/done", 0) == world, PATIENCE, "not all ranks wrote their files")
        keys = [f"{self._key}/{rank}" for rank in range(world)]
        found = [json.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return found

    def conclude(self, error: str | None) -> None:
        """Announce that the checkpoint is published, or why not."""
        self._set("outcome", error)

    # -- other ranks --------------------------------------------------------------------------------------------------

    def folder(self) -> str:
        """Wait for the directory that rank 0 announces; raise its error if it failed before."""
        self._await(lambda: self._has("folder") or self._has("outcome"), 2 * PATIENCE, "rank 0 did not begin")
        if not self._has("folder"):
            self.outcome()
        return self._get("folder")

    def outcome(self) -> None:
        """Wait until the checkpoint is published; raise the error that rank 0 announces."""
        self._await(lambda: self._has("outcome"), 2 * PATIENCE, "rank 0 did not finish")
        error = self._get("outcome")
        if error is not None:
            raise CheckpointError(error)

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def report(self, content: dict[str, Any]) -> None:
        """Report the files of this rank, or `{"error": reason}`."""
        self._set(str(self.writers.rank), content)
        self.writers.store.add(f"{self._key}/done", 1)

    def abandon(self, error: BaseException) -> None:
        """Report that this rank cannot take part, and leave."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            if self.writers.is_main:
                self.conclude(self.failed(self.blame(error)))
            else:
                self.report({"error": self.blame(error)})
        self.leave()

    def leave(self) -> None:
        """Leave the save; the last rank to leave deletes the keys."""
        store = self.writers.store
        with contextlib.suppress(RuntimeError):  # the store is gone
            if store.add(f"{self._key}/left", 1) == self.writers.world:
                for part in ("folder", "done", "outcome", "left"):
                    store.delete_key(f"{self._key}/{part}")

    def blame(self, error: BaseException | str) -> str:
        """Describe an error of this rank."""
        kind = "" if isinstance(error, (str, CheckpointError)) else f"{type(error).__name__}: "
        return f"rank {self.writers.rank} on {socket.gethostname()}: {kind}{error}"

    def failed(self, why: str) -> str:
        return failure(self.target, why)

    def _await(self, ready: Callable[[], bool], patience: float, otherwise: str) -> None:
        """Poll: waiting inside the store would block other threads."""
        pause, why = 0.002, f"{otherwise} within {patience:,.0f} s"
        deadline, failed = time.monotonic() + patience, False
        try:
            while not ready():
                if not failed and self.writers.store.check([self.writers.failure_key]):
                    failed, why = True, f"{otherwise}, because the run has failed on some rank"
                    deadline = min(deadline, time.monotonic() + GRACE)
                if time.monotonic() > deadline:
                    raise CheckpointError(self.failed(why))
                time.sleep(pause)
                pause = min(1.3 * pause, LONGEST_PAUSE)
        except RuntimeError as error:
            raise CheckpointError(self.failed(f"the ranks' store cannot be reached: {error}")) from error

    def _has(self, part: str) -> bool:
        return self.writers.store.check([f"{self._key}/{part}"])

    def _get(self, part: str) -> Any:
        return json.loads(self.writers.store.get(f"{self._key}/{part}"))

    def _set(self, part: str, content: Any) -> None:
        self.writers.store.set(f"{self._key}/{part}", json.dumps(content))
