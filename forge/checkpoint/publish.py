"""Writing a checkpoint: a temporary directory beside the target, synced, then renamed, so that the name never lies."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.checkpoint import manifest, temp_names, tensors
from forge.checkpoint.tree import Split, split
from forge.errors import CheckpointError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


def write_checkpoint(target: Path, tree: dict[str, Any]) -> None:
    """Write a tree as the checkpoint directory `target`, durably, before returning.

    Whoever is killed meanwhile leaves the old directory of that name, or the new one, or a temporary one that
    `Checkpoints.sweep` puts right. On an error nothing of the new one is left.
    """
    publish(Path(target), split(tree))


def publish(target: Path, content: Split) -> None:
    """`write_checkpoint` of a tree that was split already."""
    with temp_names.temporary(target) as (partial, aside):
        try:
            make_folder(target.parent)
            _write_directory(partial, content)
            move_into_place(partial, target, aside)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise _explained(target, error) from error
            raise


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, where there is none."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(DIRECTORY_MODE, exist_ok=True)
        for parent in (folder.parent, folder.parent.parent):
            sync_directory(parent)


def sync_directory(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def make_directory(folder: Path) -> None:
    """Make the directory of a checkpoint."""
    os.mkdir(folder, DIRECTORY_MODE)
    os.chmod(folder, DIRECTORY_MODE)  # whatever the umask took away


def _write_directory(folder: Path, content: Split) -> None:
    make_directory(folder)
    pieces = {
        "state.json": [memoryview(content.document)],
        "model.safetensors": tensors.encode(content.model, "model.safetensors"),
        "state.safetensors": tensors.encode(content.state, "state.safetensors"),
    }
    records = {name: write_file(folder / name, pieces[name]) for name in manifest.FILES}
    write_file(folder / manifest.NAME, [memoryview(manifest.encode(records))])
    sync_directory(folder)


def write_file(path: Path, pieces: Iterable[memoryview]) -> manifest.FileRecord:
    """Write, hash and sync in one pass."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.fchmod(descriptor, FILE_MODE)
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            while len(piece):
                piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return manifest.FileRecord(size, digest.hexdigest())


def move_into_place(partial: Path, target: Path, aside: Path) -> None:
    """Give a directory its name.

    Two renames where something is there already: between them a kill leaves both, which a sweep puts right.
    """
    try:
        if os.path.lexists(target):
            os.rename(target, aside)
        os.rename(partial, target)
        sync_directory(target.parent)
    except BaseException:
        if not os.path.lexists(partial):
            os.rename(target, partial)
        if os.path.lexists(aside):
            os.rename(aside, target)
        raise
    with suppress(OSError):  # the new one is in its place: what is left of the old one waits for a sweep
        temp_names.remove(aside)


def _explained(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {target} could not be written: {cause_of(target, error)}. Nothing of it was left "
        "behind; earlier checkpoints are untouched."
    )


def cause_of(target: Path, error: OSError) -> str:
    """What an error of the file system comes from, with what there is left of the disk."""
    try:
        existing = next(folder for folder in target.absolute().parents if folder.is_dir())
        free = f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB are free there"
    except OSError:
        free = "how much is free there cannot be told"
    return f"{error.strerror or error}; {free}"
