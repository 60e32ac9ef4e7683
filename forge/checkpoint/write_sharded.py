"""Writing a checkpoint on several ranks: each its own files, in one directory that rank 0 makes, closes and names."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.checkpoint import manifest, publish, temp_names, tensors
from forge.checkpoint.tree import Split, split
from forge.checkpoint.writers import Meeting, Team
from forge.errors import CheckpointError

IN_SIGHT = 20.0
"""Seconds after which a directory that rank 0 made can be seen on every host, if ever."""

Then = Callable[[], None] | None


def write_together(target: Path, tree: dict[str, Any], team: Team, then: Then = None) -> None:
    """`write_checkpoint` on every rank of a team; returns when the checkpoint is published, or raises one error on all.

    `then` is called on rank 0, where given, before anybody returns.
    """
    meeting = Meeting(team, Path(target))
    try:
        content = split(tree, team)
    except BaseException as error:
        meeting.abandon(error)
        raise
    publish_together(content, meeting, then)


def publish_together(content: Split, meeting: Meeting, then: Then = None) -> None:
    """`write_together` of a tree that was split already."""
    try:
        if meeting.team.is_main:
            _lead(content, meeting, then)
        else:
            _write_share(meeting.target.parent / meeting.folder(), content, meeting)
            meeting.outcome()
    finally:
        meeting.leave()


def _lead(content: Split, meeting: Meeting, then: Then) -> None:
    try:
        _publish(meeting.target, content, meeting)
        if then is not None:
            then()
    except BaseException as error:
        told = str(error) if isinstance(error, CheckpointError) else meeting.failed(meeting.blame(_text(error)))
        with suppress(RuntimeError):  # a store that is gone
            meeting.conclude(told)
        raise
    meeting.conclude(None)


def _publish(target: Path, content: Split, meeting: Meeting) -> None:
    """Make the directory, write, and give it its name once everybody's files are in it."""
    with temp_names.temporary(target) as (partial, aside):
        try:
            publish.make_folder(target.parent)
            publish.make_directory(partial)
            meeting.announce(partial.name)
            _write_share(partial, content, meeting)
            records = _collect(partial, content.layout, meeting)
            publish.write_file(partial / manifest.NAME, [memoryview(manifest.encode(records))])
            publish.sync_directory(partial)
            publish.move_into_place(partial, target, aside)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                why = meeting.blame(publish.cause_of(target, error))
                raise CheckpointError(meeting.failed(why)) from error
            raise


def _write_share(folder: Path, content: Split, meeting: Meeting) -> None:
    """Write this rank's files into the directory that rank 0 made, and report them, or what went wrong."""
    team = meeting.team
    names = manifest.files_of_rank(team.rank, team.world)
    try:
        _await_sight(folder)
        files = {
            names["model"]: publish.write_file(folder / names["model"], tensors.encode(content.model, names["model"])),
            names["state"]: publish.write_file(folder / names["state"], tensors.encode(content.state, names["state"])),
        }
        if team.is_main:
            files[manifest.DOCUMENT] = publish.write_file(folder / manifest.DOCUMENT, [memoryview(content.document)])
        else:
            publish.sync_directory(folder)
        report = {"files": files, "layout": content.layout}
    except OSError as error:
        report = {"error": meeting.blame(publish.cause_of(folder, error))}
    except Exception as error:
        report = {"error": meeting.blame(_text(error))}
    except BaseException as error:
        meeting.report({"error": meeting.blame(_text(error))})
        raise
    meeting.report(report)


def _await_sight(folder: Path) -> None:
    """A network file system may show a new directory a little late; another file system never does."""
    deadline = time.monotonic() + IN_SIGHT
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"it does not see {folder}, which rank 0 made. The run folder must be on a file system that all hosts "
                "share"
            )
        time.sleep(0.05)


def _collect(partial: Path, layout: str, meeting: Meeting) -> dict[str, manifest.FileRecord]:
    """The records of all ranks' files, if nobody failed, and all saved the same state."""
    reports = meeting.reports()
    for report in reports:
        if "error" in report:
            raise CheckpointError(meeting.failed(report["error"]))
    for rank, report in enumerate(reports):
        if report["layout"] != layout:
            why = f"the state of rank {rank} has tensors of other names, shapes or placements than that of rank 0"
            raise CheckpointError(meeting.failed(why))
    records = {name: manifest.FileRecord(*record) for report in reports for name, record in report["files"].items()}
    for name, record in records.items():
        size = (partial / name).stat().st_size
        if size != record.size:
            raise CheckpointError(meeting.failed(f"rank 0 sees {size:,} of the {record.size:,} bytes of {name}"))
    return records


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
