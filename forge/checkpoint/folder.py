"""The `checkpoints` folder of a run: what is in it, the newest that can be trusted, putting right what a kill left."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from forge.checkpoint import manifest, temp_names
from forge.checkpoint.checkpoint import NAME, Checkpoint
from forge.checkpoint.publish import sync_directory
from forge.errors import CheckpointError

logger = logging.getLogger("forge")

_POINTER = re.compile(r"[a-z][a-z0-9_-]*")


class Checkpoints:
    """The checkpoints of one run. The folder need not exist yet."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def path(self, update: int) -> Path:
        """Where the checkpoint after `update` updates belongs."""
        return self.folder / f"update-{update:08d}"

    def all(self) -> list[Path]:
        """Every directory with a checkpoint's name, oldest first; none has been verified."""
        try:
            with os.scandir(self.folder) as entries:
                found = [e.name for e in entries if NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((self.folder / name for name in found), key=lambda path: Checkpoint(path).update)

    def newest_valid(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; each one passed over is named in a warning, with the reason."""
        for path in reversed(self.all()):
            checkpoint = Checkpoint(path)
            try:
                checkpoint.verify()
            except CheckpointError as error:
                logger.warning("Passing over the checkpoint %s: %s", path.name, error)
            else:
                return checkpoint
        return None

    def remove(self, path: Path) -> None:
        """Remove a checkpoint of this folder; whoever is killed meanwhile leaves nothing torn under its name."""
        path = Path(path)
        if not NAME.fullmatch(path.name) or path.parent.absolute() != self.folder.absolute():
            raise CheckpointError(f"{path} is not a checkpoint in {self.folder}; only those are removed.")
        with temp_names.temporary(path) as (doomed, _):
            try:
                with suppress(FileNotFoundError):
                    os.rename(path, doomed)
                temp_names.remove(doomed)
            except OSError as error:
                raise CheckpointError(f"The checkpoint {path} could not be removed: {error}.") from error

    def sweep(self) -> None:
        """Finish or undo what processes that are gone left half done; what a living one is writing is left alone."""
        if not self.folder.is_dir():
            return
        # first what was set aside: its successor may still wait under a temporary name
        found = sorted(temp_names.leftovers(self.folder), key=lambda leftover: leftover.kind != "old")
        for leftover in found:
            try:
                if leftover.kind == "old":
                    self._settle(leftover)
                temp_names.remove(leftover.path)
            except OSError as error:
                logger.warning("%s is left over from a dead process and could not be removed: %s", leftover.path, error)

    def point(self, name: str, path: Path) -> None:
        """Let the link `name` (latest, best, …) point to a checkpoint; skipped where the file system has no links."""
        if not _POINTER.fullmatch(name) or NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} is no name for a link to a checkpoint.")
        link = self.folder / name
        with temp_names.temporary(link) as (fresh, _):
            try:
                os.symlink(os.path.relpath(path, self.folder), fresh)
                os.replace(fresh, link)
            except (OSError, NotImplementedError) as error:
                logger.debug("No link %s: %s", link, error)
                with suppress(OSError):
                    temp_names.remove(fresh)

    def _settle(self, old: temp_names.Leftover) -> None:
        """A kill while a checkpoint was replaced: the name goes to the new one if it is whole, else to the old one."""
        chosen = next(filter(_is_valid, (old.target, old.twin, old.path)), None)
        if chosen is None and not os.path.lexists(old.target):
            chosen = old.path  # a format of another forge, say: not ours to throw away
        if chosen is not None and chosen != old.target:
            temp_names.remove(old.target)
            os.rename(chosen, old.target)
            sync_directory(self.folder)


def _is_valid(path: Path) -> bool:
    try:
        Checkpoint(path).verify()
    except CheckpointError:
        return False
    return True


def find(path: Path) -> Checkpoint:
    """`Checkpoint.find`: the path may be a link, since the user named it; nothing inside is followed."""
    if not path.exists():
        gone = "leads to a checkpoint that is gone" if path.is_symlink() else "does not exist"
        raise CheckpointError(f"{path} {gone}. Give a run folder, or a checkpoint in its `checkpoints` folder.")
    real = path.resolve()
    if real.is_file():
        raise CheckpointError(f"{path} is a file. Give the checkpoint directory that it is in, or the run folder.")
    if NAME.fullmatch(real.name) or os.path.lexists(real / manifest.NAME):
        return Checkpoint(real)
    folder = real / "checkpoints" if (real / "checkpoints").is_dir() else real
    checkpoints = Checkpoints(folder)
    found = checkpoints.newest_valid()
    if found is None:
        count = len(checkpoints.all())
        why = f"none of the {count} checkpoints there is valid" if count else "there is no checkpoint in it"
        raise CheckpointError(f"{path}: {why}. Give a run folder with checkpoints, or a checkpoint directory.")
    return found
