"""Write a checkpoint to a temporary directory beside the target, sync it, then rename it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.checkpoint import manifest, temp_names, tensors
from forge.checkpoint.hashing import new_hash
from forge.checkpoint.tree import Split, split
from forge.checkpoint.writers import failure
from forge.errors import CheckpointError
from forge.util.files import access, make_accessible, make_folder, sync_directory


def write_checkpoint(target: Path, tree: dict[str, Any]) -> None:
    """Write a tree as the checkpoint directory `target`, durably, before returning.

    A kill meanwhile leaves the old directory, or the new one, or a temporary one for `Checkpoints.sweep`. On an error
    nothing of the new one remains.
    """
    publish(Path(target), split(tree))


def publish(target: Path, content: Split) -> None:
    """Write a checkpoint from a tree that is already split."""
    with temp_names.temporary(target) as (partial, aside):
        try:
            make_folder(target.parent)
            _write_directory(partial, content)
            move_into_place(partial, target, aside)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(failure(target, cause_of(target, error))) from error
            raise


def make_directory(folder: Path) -> None:
    os.mkdir(folder, access(folder, 7))
    make_accessible(folder)


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
    digest, size, mode = new_hash(), 0, access(path, 6)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
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
    """Rename a directory to its final name.

    If the name is taken, that takes two renames; after a kill between them, a sweep restores the name.
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
    with suppress(OSError):  # the new one is in place: a sweep removes the rest of the old one
        temp_names.remove(aside)


def cause_of(target: Path, error: OSError) -> str:
    """Describe an error of the file system, with the free space of the disk."""
    try:
        existing = next(folder for folder in target.absolute().parents if folder.is_dir())
        free = f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB are free there"
    except OSError:
        free = "the free space there is unknown"
    return f"{error.strerror or error}; {free}"
