"""Team: the ranks that write a checkpoint together, and what they tell each other through the store.

No collective is used: a save happens in a background thread on every rank, while the main threads train. A save is a
meeting with keys of its own in the store. Rank 0 says where the files go, each rank reports what it wrote, rank 0 says
what became of it.
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

from forge.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = 1800.0
"""Seconds that rank 0 waits for the slowest when it has written its own files."""
GRACE = 3.0
"""Seconds that a write may still take when the run has failed on some rank."""
LONGEST_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class Team:
    """One rank among those that share a store."""

    rank: int
    world: int
    store: Store
    failure_key: str = "forge/failure"
    "Whoever fails sets this key: nobody then waits for what will not come."

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def apart(self) -> Team:
        """The same team over a connection of its own, which a thread can use while another one waits on the first."""
        return replace(self, store=self.store.clone())


class Meeting:
    """One save. Every rank makes one for each save, in the same order; `leave` must follow, whatever happens."""

    def __init__(self, team: Team, target: Path):
        self.team, self.target = team, target
        number = team.store.add(f"forge/checkpoint/begun/{team.rank}", 1)
        self._key = f"forge/checkpoint/{number}/{target.name}"

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def announce(self, folder: str) -> None:
        """Say in which directory, beside the target, everybody's files belong."""
        self._set("folder", folder)

    def reports(self) -> list[dict[str, Any]]:
        """What every rank reported, by rank, once all have."""
        store, world = self.team.store, self.team.world
        self._await(lambda: store.add(f"{self._key}/done", 0) == world, PATIENCE, "not all ranks wrote their files")
        keys = [f"{self._key}/{rank}" for rank in range(world)]
        found = [json.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return found

    def conclude(self, error: str | None) -> None:
        """Tell all ranks that the checkpoint is there, or why not."""
        self._set("outcome", error)

    # -- the others ---------------------------------------------------------------------------------------------------

    def folder(self) -> str:
        """What rank 0 announced; its error, if it never came to that."""
        self._await(lambda: self._has("folder") or self._has("outcome"), 2 * PATIENCE, "rank 0 did not begin")
        if not self._has("folder"):
            self.outcome()
        return self._get("folder")

    def outcome(self) -> None:
        """Return when the checkpoint is published; raise what rank 0 says went wrong."""
        self._await(lambda: self._has("outcome"), 2 * PATIENCE, "rank 0 did not finish")
        error = self._get("outcome")
        if error is not None:
            raise CheckpointError(error)

    # -- everybody ----------------------------------------------------------------------------------------------------

    def report(self, content: dict[str, Any]) -> None:
        """What this rank wrote, or `{"error": why not}`."""
        self._set(str(self.team.rank), content)
        self.team.store.add(f"{self._key}/done", 1)

    def abandon(self, error: BaseException) -> None:
        """This rank cannot take part: let all know why, and leave."""
        with contextlib.suppress(RuntimeError):  # a store that is gone
            text = self.blame(str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
            if self.team.is_main:
                self.conclude(self.failed(text))
            else:
                self.report({"error": text})
        self.leave()

    def leave(self) -> None:
        """The last to leave takes the keys away."""
        store = self.team.store
        with contextlib.suppress(RuntimeError):  # a store that is gone
            if store.add(f"{self._key}/left", 1) == self.team.world:
                for part in ("folder", "done", "outcome", "left"):
                    store.delete_key(f"{self._key}/{part}")

    def blame(self, what: str) -> str:
        """What went wrong, and whose it was."""
        return f"rank {self.team.rank} on {socket.gethostname()}: {what}"

    def failed(self, why: str) -> str:
        return (
            f"The checkpoint {self.target} could not be written: {why.removesuffix('.')}. Nothing of it was left "
            "behind; earlier checkpoints are untouched."
        )

    def _await(self, ready: Callable[[], bool], patience: float, otherwise: str) -> None:
        """Look again and again: waiting inside the store would keep other threads from it."""
        pause, why = 0.002, f"{otherwise} within {patience:,.0f} s"
        deadline, failed = time.monotonic() + patience, False
        try:
            while not ready():
                if not failed and self.team.store.check([self.team.failure_key]):
                    failed, why = True, f"{otherwise}, because the run has failed on some rank"
                    deadline = min(deadline, time.monotonic() + GRACE)
                if time.monotonic() > deadline:
                    raise CheckpointError(self.failed(why))
                time.sleep(pause)
                pause = min(1.3 * pause, LONGEST_PAUSE)
        except RuntimeError as error:
            raise CheckpointError(self.failed(f"the ranks' store cannot be reached: {error}")) from error

    def _has(self, part: str) -> bool:
        return self.team.store.check([f"{self._key}/{part}"])

    def _get(self, part: str) -> Any:
        return json.loads(self.team.store.get(f"{self._key}/{part}"))

    def _set(self, part: str, content: Any) -> None:
        self.team.store.set(f"{self._key}/{part}", json.dumps(content))
