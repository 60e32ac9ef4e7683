"""Mirror: a thread that brings the checkpoints that a run keeps to a remote place.

It is given a set of updates after every save, and works towards the latest set, the newest first: files before the
manifest, which marks a checkpoint as complete. Nothing is removed there; what an abandoned course left behind, newer
than the run's newest, loses its manifest. Whatever fails is tried again with the next set, so that an outage or a kill
leaves nothing to repair.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from forge.checkpoint import manifest
from forge.checkpoint.folder import Checkpoints
from forge.errors import CheckpointError
from forge_cluster.storage.remote import RemoteCheckpoints

logger = logging.getLogger("forge")


class Mirror:
    """Uploads from a thread of its own, on rank 0."""

    def __init__(self, remote: RemoteCheckpoints, folder: Checkpoints):
        self._remote, self._folder = remote, folder
        self._wanted: frozenset[int] = frozenset()
        self._uploading: int | None = None
        self._there: dict[int, bytes | None] = {}
        "The manifests that are there, by update; None of an upload that broke off."
        self._is_listed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._due = self._closing = False
        self._thread = threading.Thread(target=self._run, name="forge-mirror", daemon=True)
        self._thread.start()

    def hold(self, updates: Iterable[int]) -> None:
        """Bring these checkpoints of the local folder to the remote place; returns at once."""
        with self._changed:
            self._wanted, self._due = frozenset(updates), True
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

    def _run(self) -> None:
        while self._await_work():
            try:
                self._synchronise()
                self._error = None
            except Exception as error:
                self._error = error
                logger.error("%s They are tried again with the next; here they are complete.", _worded(error))

    def _await_work(self) -> bool:
        """Wait for a new set; return False when there is none to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._closing)
            due, self._due = self._due, False
            return due

    def _synchronise(self) -> None:
        """Upload what is missing, the newest first; start again with a set that has arrived meanwhile."""
        if not self._is_listed:
            recent = [update for update in self._remote.updates() if update >= min(self._wanted, default=0)]
            self._there = {update: self._remote.manifest(update) for update in recent}
            self._is_listed = True
        while True:
            with self._changed:
                wanted, self._due = self._wanted, False
                missing = self._next_missing(wanted)
                self._uploading = None if missing is None else missing[0]
            if missing is None:
                return
            try:
                self._upload(*missing)
                if missing[0] == max(wanted):
                    self._disown(missing[0])
            finally:
                with self._changed:
                    self._uploading = None

    def _next_missing(self, wanted: frozenset[int]) -> tuple[int, bytes] | None:
        """Return the newest checkpoint that is not there as it is here, and its manifest."""
        for update in sorted(wanted, reverse=True):
            try:
                data = (self._folder.path(update) / manifest.NAME).read_bytes()
            except FileNotFoundError:
                continue  # removed since
            if self._there.get(update) != data:
                return update, data
        return None

    def _upload(self, update: int, data: bytes) -> None:
        path = self._folder.path(update)
        self._withdraw(update)
        self._there[update] = None
        self._remote.upload(path, manifest.decode(data, str(path / manifest.NAME)))
        self._remote.publish(update, data)
        self._there[update] = data
        logger.debug("The checkpoint of update %d is at %s.", update, self._remote.url)

    def _disown(self, newest: int) -> None:
        """Withdraw what is newer than the newest of the run: it belongs to a course that was abandoned."""
        for update in [update for update in self._there if update > newest]:
            self._withdraw(update)

    def _withdraw(self, update: int) -> None:
        if self._there.get(update) is not None:
            self._remote.withdraw(update)
            self._there[update] = None


def _worded(error: Exception) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"Checkpoints were not uploaded. {kind}{error}"
