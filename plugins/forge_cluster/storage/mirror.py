"""Mirror: a thread that makes a remote place hold the checkpoints that a run keeps.

It is given a set of updates after every save, and works towards the latest set: the newest missing checkpoint is
uploaded first, files before the manifest, and others are removed once a newer one is complete. Whatever fails is tried
again with the next set, so that an outage or a kill leaves nothing to repair.

With several ranks rank 0 decides, and orders an upload through the store; each rank uploads its own files from the run
folder that they share, and rank 0 publishes the manifest when all have reported.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from forge.checkpoint import manifest
from forge.checkpoint.folder import Checkpoints
from forge.checkpoint.writers import GRACE, PATIENCE, Writers
from forge.errors import CheckpointError
from forge_cluster.storage.remote import RemoteCheckpoints, RemoteFailure

logger = logging.getLogger("forge")

POLL = 0.5
"""Seconds between two looks of a rank for an order of rank 0."""
STOP = -1
"""The order that ends the threads of other ranks."""


class Mirror:
    """Uploads from a thread of its own. Every rank has one; only rank 0 calls `hold`."""

    def __init__(
        self,
        remote: RemoteCheckpoints,
        folder: Checkpoints,
        writers: Writers | None = None,
        keep_older: bool = False,
    ):
        self._remote, self._folder = remote, folder
        self._team = None if writers is None else _Team(writers)
        self._keep_older = keep_older
        self._wanted: frozenset[int] = frozenset()
        self._uploading: int | None = None
        self._published: dict[int, bytes] = {}
        "The manifests known to be there."
        self._there: set[int] | None = None
        "The updates of which anything is there; None until they are listed."
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._due = self._closing = self._prunes = False
        leads = self._team is None or self._team.is_main
        self._thread = threading.Thread(target=self._lead if leads else self._follow, name="forge-mirror", daemon=True)
        self._thread.start()

    def hold(self, updates: Iterable[int], prune: bool = True) -> None:
        """Let the remote place hold these checkpoints of the local folder, with `prune` no others; returns at once."""
        with self._changed:
            self._wanted, self._due, self._prunes = frozenset(updates), True, prune
            self._changed.notify_all()

    def in_use(self) -> set[int]:
        """Return the update that is being uploaded: its local files must stay."""
        with self._changed:
            return set() if self._uploading is None else {self._uploading}

    def close(self) -> None:
        """Wait until everything is uploaded or has failed; raise the error of the last try."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(_worded(self._error)) from self._error

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        try:
            while self._await_work():
                try:
                    self._synchronise()
                    self._error = None
                except Exception as error:
                    self._error = error
                    logger.error("%s They are tried again with the next; here they are complete.", _worded(error))
        finally:
            if self._team is not None:
                with suppress(CheckpointError):  # the store is gone, and the other ranks with it
                    self._team.order(STOP)

    def _await_work(self) -> bool:
        """Wait for a new set; return False when there is none to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._closing)
            due, self._due = self._due, False
            return due

    def _synchronise(self) -> None:
        """Upload what is missing, the newest first; start again with a set that has arrived meanwhile."""
        if self._there is None:
            self._there = set(self._remote.leftovers())
        while True:
            with self._changed:
                wanted, self._due, prunes = self._wanted, False, self._prunes
                missing = self._next_missing(wanted)
                self._uploading = None if missing is None else missing[0]
            try:
                if missing is not None:
                    self._upload(*missing)
            finally:
                with self._changed:
                    self._uploading = None
            if prunes:
                self._prune(wanted)
            if missing is None:
                return

    def _next_missing(self, wanted: frozenset[int]) -> tuple[int, bytes] | None:
        """Return the newest checkpoint that is not there as it is here, and its manifest."""
        for update in sorted(wanted, reverse=True):
            try:
                data = (self._folder.path(update) / manifest.NAME).read_bytes()
            except FileNotFoundError:
                continue  # removed since
            if self._published.get(update) != data:
                return update, data
        return None

    def _upload(self, update: int, data: bytes) -> None:
        assert self._there is not None
        if update in self._there and self._remote.manifest(update) == data:  # by an earlier attempt
            self._published[update] = data
            return
        self._published.pop(update, None)
        if update in self._there:
            self._remote.withdraw(update)
        self._there.add(update)
        names = tuple(manifest.decode(data, str(self._folder.path(update) / manifest.NAME)))
        upload_share(self._remote, self._folder.path(update), names, self._team)
        self._remote.publish(update, data)
        self._published[update] = data
        logger.debug("The checkpoint of update %d is at %s.", update, self._remote.url)

    def _prune(self, wanted: frozenset[int]) -> None:
        """Remove what is not wanted, and of which a newer one is complete; an abandoned course once the newest is."""
        assert self._there is not None
        complete = wanted & self._published.keys()
        if not complete:
            return
        newest, has_newest = max(complete), max(wanted) in complete
        for update in sorted(self._there - wanted):
            if (update < newest and not self._keep_older) or (update > newest and has_newest):
                try:
                    self._remote.remove(update)
                except RemoteFailure as error:  # a bucket may forbid it
                    logger.warning("Older checkpoints stay there: %s", error)
                    return
                self._there.discard(update)
                self._published.pop(update, None)

    # -- other ranks --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        team = self._team
        assert team is not None
        try:
            while (update := team.next_order()) != STOP:
                path, problem = self._folder.path(update), ""
                try:
                    names = tuple(manifest.decode((path / manifest.NAME).read_bytes(), str(path)))
                    upload_share(self._remote, path, names, team, alone=True)
                except Exception as error:
                    problem = f"rank {team.rank}: {error}"
                team.report(problem)
        except RuntimeError:  # of the store
            logger.debug("The store of the ranks is gone; rank %d uploads no more.", team.rank)


def _worded(error: Exception) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"Checkpoints were not uploaded. {kind}{error}"


class _Team:
    """Orders of rank 0 to all ranks, and their reports, through the store."""

    def __init__(self, writers: Writers):
        self._writers = writers.reconnected()
        self._store, self.rank, self.world = self._writers.store, writers.rank, writers.world
        number = self._store.add(f"forge/mirror/begun/{self.rank}", 1)
        self._key, self._number = f"forge/mirror/{number}", 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def order(self, update: int) -> None:
        """Order all other ranks to upload their files of a checkpoint."""
        self._number += 1
        try:
            self._store.set(f"{self._key}/{self._number}/order", str(update))
        except RuntimeError as error:
            raise CheckpointError(f"The ranks' store cannot be reached: {error}.") from error

    def next_order(self) -> int:
        """Wait for the next order."""
        self._number += 1
        key = f"{self._key}/{self._number}/order"
        while not self._store.check([key]):
            time.sleep(POLL)
        return int(self._store.get(key))

    def report(self, problem: str) -> None:
        self._store.set(f"{self._key}/{self._number}/{self.rank}", json.dumps(problem))

    def reports(self) -> None:
        """Wait until all ranks have reported; raise the first problem."""
        keys = [f"{self._key}/{self._number}/{rank}" for rank in range(1, self.world)]
        deadline, failed = time.monotonic() + PATIENCE, False
        while not self._store.check(keys):
            if not failed and self._store.check([self._writers.failure_key]):
                failed, deadline = True, time.monotonic() + GRACE
            if time.monotonic() > deadline:
                raise CheckpointError("Not all ranks have uploaded their files of a checkpoint.")
            time.sleep(POLL / 5)
        problems = [json.loads(self._store.get(key)) for key in keys]
        for key in [*keys, f"{self._key}/{self._number}/order"]:
            self._store.delete_key(key)
        problem = next(filter(None, problems), None)
        if problem is not None:
            raise CheckpointError(problem)


def upload_share(
    remote: RemoteCheckpoints, path: Path, names: tuple[str, ...], team: _Team | None, alone: bool = False
) -> None:
    """Upload the files of this rank; on rank 0 order the others to, and wait for them."""
    if team is None:
        remote.upload(path, names)
        return
    if not alone:
        team.order(int(path.name.removeprefix("update-")))
    remote.upload(path, share_of(names, team.rank, team.world))
    if not alone:
        team.reports()


def share_of(names: tuple[str, ...], rank: int, world: int) -> list[str]:
    """Return the files that a rank uploads: those that it wrote, or its part of those that other ranks wrote."""
    if names != manifest.files_of(world) or world == 1:
        return list(names[rank::world])
    own = [*manifest.files_of_rank(rank, world).values()]
    return [manifest.DOCUMENT, *own] if rank == 0 else own
