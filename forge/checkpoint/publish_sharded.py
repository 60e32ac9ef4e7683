"""Write a checkpoint on several ranks: each writes its files into one directory that rank 0 creates and publishes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.checkpoint import manifest, publish, temp_names, tensors
from forge.checkpoint.tree import Split, split
from forge.checkpoint.writers import SharedSave, Writers
from forge.errors import CheckpointError
from forge.util.files import make_folder, sync_directory

IN_SIGHT = 20.0
"""Seconds within which a directory that rank 0 made becomes visible on every host."""

Then = Callable[[], None] | None


def write_sharded(target: Path, tree: dict[str, Any], writers: Writers, then: Then = None) -> None:
    """Write a checkpoint, called on every rank; return once it is published, or raise one error on all ranks.

    `then` is called on rank 0 before any rank returns.
    """
    save = SharedSave(writers, Path(target))
    try:
        content = split(tree, writers)
    except BaseException as error:
        save.abandon(error)
        raise
    publish_sharded(content, save, then)


def publish_sharded(content: Split, save: SharedSave, then: Then = None) -> None:
    """Write a checkpoint from a tree that is already split."""
    try:
        if save.writers.is_main:
            _lead(content, save, then)
        else:
            _write_share(save.target.parent / save.folder(), content, save)
            save.outcome()
    finally:
        save.leave()


def _lead(content: Split, save: SharedSave, then: Then) -> None:
    try:
        _publish(save.target, content, save)
        if then is not None:
            then()
    except BaseException as error:
        why = str(error) if isinstance(error, CheckpointError) else save.failed(save.blame(error))
        with suppress(RuntimeError):  # the store is gone
            save.conclude(why)
        raise
    save.conclude(None)


def _publish(target: Path, content: Split, save: SharedSave) -> None:
    """Create the directory, write, and rename it once it holds the files of all ranks."""
    with temp_names.temporary(target) as (partial, aside):
        try:
            make_folder(target.parent)
            publish.make_directory(partial)
            save.announce(partial.name)
            _write_share(partial, content, save)
            records = _collect(partial, content.layout, save)
            publish.write_file(partial / manifest.NAME, [memoryview(manifest.encode(records))])
            sync_directory(partial)
            publish.move_into_place(partial, target, aside)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                why = save.blame(publish.cause_of(target, error))
                raise CheckpointError(save.failed(why)) from error
            raise


def _write_share(folder: Path, content: Split, save: SharedSave) -> None:
    """Write this rank's files into the directory of rank 0, and report them, or the error."""
    writers = save.writers
    names = manifest.files_of_rank(writers.rank, writers.world)
    try:
        _await_sight(folder)
        held = {names["model"]: content.model, names["state"]: content.state}
        files = {name: publish.write_file(folder / name, tensors.encode(held[name], name)) for name in held}
        if writers.is_main:
            files[manifest.DOCUMENT] = publish.write_file(folder / manifest.DOCUMENT, [memoryview(content.document)])
        else:
            sync_directory(folder)
        report = {"files": files, "layout": content.layout}
    except OSError as error:
        report = {"error": save.blame(publish.cause_of(folder, error))}
    except Exception as error:
        report = {"error": save.blame(error)}
    except BaseException as error:
        save.report({"error": save.blame(error)})
        raise
    save.report(report)


def _await_sight(folder: Path) -> None:
    """Wait for a new directory: a network file system may show it late, one that is not shared never does."""
    deadline = time.monotonic() + IN_SIGHT
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"it does not see {folder}, which rank 0 made. The run folder must be on a file system that all hosts "
                "share"
            )
        time.sleep(0.05)


def _collect(partial: Path, layout: str, save: SharedSave) -> dict[str, manifest.FileRecord]:
    """Return the records of all ranks' files; raise if a rank failed or saved a different state."""
    reports = save.reports()
    for report in reports:
        if "error" in report:
            raise CheckpointError(save.failed(report["error"]))
    for rank, report in enumerate(reports):
        if report["layout"] != layout:
            why = f"rank {rank} has tensors of other names, shapes or placements than rank 0"
            raise CheckpointError(save.failed(why))
    records = {name: manifest.FileRecord(*record) for report in reports for name, record in report["files"].items()}
    for name, record in records.items():
        size = (partial / name).stat().st_size
        if size != record.size:
            raise CheckpointError(save.failed(f"rank 0 sees {size:,} of the {record.size:,} bytes of {name}"))
    return records
