"""A folder of checkpoints: save and restore, list it, find the newest valid one, clean up after killed processes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.checkpoint import manifest, objects, temp_names
from forge.checkpoint.checkpoint import NAME, StoredCheckpoint
from forge.checkpoint.publish import write_checkpoint
from forge.checkpoint.readers import ALONE, Readers
from forge.errors import CheckpointError
from forge.util.files import sync_directory

logger = logging.getLogger("forge")

_POINTER = re.compile(r"[a-z][a-z0-9_-]*")


class Checkpoints:
    """The checkpoints of one run. The folder need not exist yet.

    A loop of your own saves and continues by two calls. `state` has names, and objects with `state_dict` and
    `load_state_dict`, random generators, or plain values::

        state = {"model": model, "optimizer": optimizer}
        saved = forge.Checkpoints("checkpoints")
        for update in range(saved.restore(state), 1000):
            ...
            if (update + 1) % 100 == 0:
                saved.save(update + 1, state, keep=2)
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def save(self, update: int, state: Mapping[str, Any], keep: int | None = None) -> None:
        """Save what a loop of your own needs to continue after `update` updates, with the global random numbers.

        It is complete on disk when this returns; only then are all but the newest `keep` removed.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}; it must be at least 1.")
        write_checkpoint(self.path(update), objects.tree_of(state))
        earlier = [number for number in self.updates() if number <= update]
        self.tidy(update, earlier[-keep:] if keep else self.updates())

    def restore(self, state: dict[str, Any]) -> int:
        """Put the newest valid checkpoint back into `state`; return its update, 0 where there is none yet.

        Call it when the objects are on their devices. A plain value is replaced in `state`.
        """
        self.sweep()
        found = self.newest_valid()
        if found is None and self.all():
            raise CheckpointError(f"None of the checkpoints in {self.folder} is valid. Remove them to start afresh.")
        if found is not None:
            objects.put_back(found.load(), state, str(found.path))
        return 0 if found is None else found.update

    def path(self, update: int) -> Path:
        """Return the path of the checkpoint after `update` updates."""
        return self.folder / f"update-{update:08d}"

    def all(self) -> list[Path]:
        """Return every directory named like a checkpoint, oldest first, not verified."""
        try:
            with os.scandir(self.folder) as entries:
                found = [e.name for e in entries if NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((self.folder / name for name in found), key=lambda path: StoredCheckpoint(path).update)

    def updates(self) -> list[int]:
        """Return the update of every checkpoint, in order, not verified."""
        return [StoredCheckpoint(path).update for path in self.all()]

    def newest_valid(self, readers: Readers = ALONE) -> StoredCheckpoint | None:
        """Return the newest valid checkpoint; warn about each skipped one, with the reason."""
        for path in reversed(readers.from_first(self.all)):
            checkpoint = StoredCheckpoint(path)
            try:
                checkpoint.verify(readers)
            except CheckpointError as error:
                if readers.rank == 0:
                    logger.warning("Skipping the checkpoint %s: %s", path.name, error)
            else:
                return checkpoint
        return None

    def remove(self, path: Path) -> None:
        """Remove a checkpoint of this folder; a kill or a crash meanwhile leaves no torn directory under its name."""
        path = Path(path)
        if not NAME.fullmatch(path.name) or path.parent.absolute() != self.folder.absolute():
            raise CheckpointError(f"{path} is not a checkpoint in {self.folder}; only those are removed.")
        with temp_names.temporary(path) as (doomed, _):
            try:
                with suppress(FileNotFoundError):
                    os.rename(path, doomed)
                    sync_directory(self.folder)  # else a crash could keep the old name and lose files
                temp_names.remove(doomed)
            except OSError as error:
                raise CheckpointError(f"The checkpoint {path} could not be removed: {error}.") from error

    def tidy(self, update: int, keep: Collection[int], best: int | None = None) -> None:
        """Link to a new checkpoint and to the best, then remove those not in `keep`. What fails is logged."""
        try:
            self.point("latest", self.path(update))
            if best is not None:
                self.point("best", self.path(best))
            for number in self.updates():
                if number not in keep:
                    self.remove(self.path(number))
        except (OSError, CheckpointError) as error:
            text = "The checkpoint of update %d is saved, but older ones could not be removed: %s"
            logger.warning(text, update, error)

    def sweep(self) -> None:
        """Finish or undo the unfinished work of dead processes; that of running ones is left alone."""
        if not self.folder.is_dir():
            return
        # first the replaced ones: their successors may still have a temporary name
        abandoned = sorted(temp_names.abandoned(self.folder), key=lambda found: found.kind != "old")
        if abandoned and not self._flushed():  # a dead process may not have flushed the names it gave
            return
        for found in abandoned:
            try:
                if found.kind == "old":
                    self._finish_replacement(found)
                temp_names.remove(found.path)
            except OSError as error:
                logger.warning("%s was left by a dead process and could not be removed: %s", found.path, error)

    def _flushed(self) -> bool:
        """Flush the names in the folder; log an error."""
        try:
            sync_directory(self.folder)
        except OSError as error:
            logger.warning("What dead processes left stays, as %s cannot be flushed: %s", self.folder, error)
            return False
        return True

    def point(self, name: str, path: Path) -> None:
        """Point the link `name` (latest, best, …) to a checkpoint; skipped if the file system has no links."""
        if not _POINTER.fullmatch(name) or NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} cannot name a link to a checkpoint.")
        link = self.folder / name
        with temp_names.temporary(link) as (fresh, _):
            try:
                os.symlink(os.path.relpath(path, self.folder), fresh)
                os.replace(fresh, link)
            except (OSError, NotImplementedError) as error:
                logger.debug("No link %s: %s", link, error)
                with suppress(OSError):
                    temp_names.remove(fresh)

    def _finish_replacement(self, old: temp_names.TempName) -> None:
        """After a kill during a replacement, name the new checkpoint if it is valid, else the old one."""
        chosen = next(filter(_is_valid, (old.target, old.twin, old.path)), None)
        if chosen is None and not os.path.lexists(old.target):
            chosen = old.path  # perhaps a newer format: keep it
        if chosen is not None and chosen != old.target:
            temp_names.remove(old.target)
            os.rename(chosen, old.target)
            sync_directory(self.folder)


def _is_valid(path: Path) -> bool:
    try:
        StoredCheckpoint(path).verify()
    except CheckpointError:
        return False
    return True


def find(path: Path) -> StoredCheckpoint:
    """Implement `StoredCheckpoint.find`: the given path may be a link; links inside are not followed."""
    if not path.exists():
        gone = "links to a checkpoint that no longer exists" if path.is_symlink() else "does not exist"
        raise CheckpointError(f"{path} {gone}. Give a run folder, or a checkpoint in its `checkpoints` folder.")
    real = path.resolve()
    if real.is_file():
        raise CheckpointError(f"{path} is a file. Give its checkpoint directory, or the run folder.")
    if NAME.fullmatch(real.name) or os.path.lexists(real / manifest.NAME):
        return StoredCheckpoint(real)
    folder = real / "checkpoints" if (real / "checkpoints").is_dir() else real
    checkpoints = Checkpoints(folder)
    found = checkpoints.newest_valid()
    if found is None:
        count = len(checkpoints.all())
        why = f"none of the {count} checkpoints there is valid" if count else "it holds no checkpoint"
        raise CheckpointError(f"{path}: {why}. Give a run folder with checkpoints, or a checkpoint directory.")
    return found
