"""The remote place of a run's checkpoints: fetched from before a run is chosen, mirrored to while it trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from fsspec.registry import known_implementations, registry

import forge
from forge.checkpoint import Checkpoints, captured
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.errors import CheckpointError, RecipeError
from forge.runs.card import name_of
from forge.runs.choose import checkpoints_of, choose, refuse_another_job
from forge.runs.job import job_of
from forge.runs.lock import RunLock
from forge.util.files import share
from forge.util.text import short_path
from forge_cluster.storage.mirror import Mirror
from forge_cluster.storage.object_storage import RemoteFailure, check_url
from forge_cluster.storage.remote import RemoteCheckpoints

logger = logging.getLogger("forge")

RECORD = "forge-run.json"
"""Which job the checkpoints belong to, written when the run starts: proof that one may write there, too."""
RUN = "{run}"


class RemoteRun:
    """The place `url` of one run; `{run}` in it stands for the name of the run folder."""

    def __init__(self, url: str):
        check_url(url.replace(RUN, "run"), "checkpoint.remote")
        scheme = url.partition("://")[0]
        if scheme not in {*known_implementations, *registry}:
            raise RecipeError(f"checkpoint.remote is {url[:200]!r}: fsspec, which reads it, knows no {scheme[:40]}://.")
        self._url = url

    def mirror(self, run_dir: Path, folder: Checkpoints) -> Mirror:
        """Return what uploads the checkpoints of a run while it trains."""
        return Mirror(self.at(run_dir), folder)

    def at(self, run_dir: Path) -> RemoteCheckpoints:
        return RemoteCheckpoints(self._url.replace(RUN, run_dir.name))

    # -- before the run is chosen -------------------------------------------------------------------------------------

    def fetch(self, trainer: forge.Run) -> Path | None:
        """On rank 0: bring what the remote place has and the run to be resumed lacks; return a folder made for it."""
        if trainer.resume is None or trainer.wanted_run_dir is False:
            return None
        choice = choose(trainer, name_of(trainer.task))
        folder = choice.run_dir
        if folder is None or (choice.source is not None and not choice.continues):
            return None
        if choice.source is None and RUN in self._url:
            logger.info("Nothing to resume here; name the run with --run-dir to fetch it from %s.", self._url)
            return None
        remote = self.at(folder)
        if remote.newest() is None:
            return None
        _refuse_another_job(trainer, remote)
        share(folder, with_group=trainer.settings["group_access"])
        with RunLock(folder):
            bring(remote, checkpoints_of(folder))
        return folder if choice.source is None else None

    # -- when the run starts ------------------------------------------------------------------------------------------

    def begin(self, trainer: forge.Run, folder: Checkpoints) -> None:
        """On rank 0: refuse a place that holds another run, and record this one there."""
        assert trainer.run_dir is not None
        remote = self.at(trainer.run_dir)
        if not folder.all() and (newest := remote.newest()) is not None:
            raise CheckpointError(
                f"{remote.url} already holds the checkpoints of a run (up to update {newest}). Use --resume or "
                f'resume="auto" to continue it, or choose another checkpoint.remote; {RUN} in it becomes the name of '
                "the run folder."
            )
        if folder.all():
            _refuse_another_job(trainer, remote)
        record = {"format": "forge-remote", "version": 1, "run": trainer.run_dir.name, **job_of(trainer)}
        try:
            remote.write(RECORD, json.dumps(record, indent=1).encode())
        except RemoteFailure as error:
            raise CheckpointError(
                f"checkpoint.remote cannot be written, so the run does not start. {error} Check the bucket and this "
                "machine's credentials, or leave checkpoint.remote out."
            ) from error


def _refuse_another_job(trainer: forge.Run, remote: RemoteCheckpoints) -> None:
    try:
        then = json.loads(remote.read(RECORD) or b"null")
    except ValueError:
        then = None
    if isinstance(then, Mapping):
        refuse_another_job(trainer, then, remote.url, "checkpoint.remote")


def bring(remote: RemoteCheckpoints, folder: Checkpoints) -> None:
    """Download the newest valid checkpoint if it is newer than the local ones, and the best that it names."""
    folder.sweep()
    valid, there = folder.newest_valid(), remote.updates()
    newer = [update for update in there if valid is None or update > valid.update]
    found = next((update for update in reversed(newer) if _fetched(remote, update, folder)), None)
    if found is None:
        if valid is None:
            raise CheckpointError(
                f"None of the {len(there)} checkpoints at {remote.url} is valid. Remove them to start afresh."
            )
        return
    logger.info("Fetched the checkpoint of update %d from %s to %s.", found, remote.url, short_path(folder.folder))
    folder.point("latest", folder.path(found))
    best = [update for update in _best(folder.path(found)) if folder.path(update).is_dir() or update in there]
    best = [update for update in best if folder.path(update).is_dir() or _fetched(remote, update, folder)]
    if best:
        folder.point("best", folder.path(best[0]))


def _fetched(remote: RemoteCheckpoints, update: int, folder: Checkpoints) -> bool:
    """Download a checkpoint that is complete; warn of a damaged one. An outage raises: an older one may be there."""
    if remote.manifest(update) is None:
        return False
    try:
        remote.fetch(update, folder.path(update))
    except RemoteFailure:
        raise
    except CheckpointError as error:
        logger.warning("Skipping a checkpoint: %s", error)
        return False
    return True


def _best(path: Path) -> list[int]:
    """Return the updates that the state of a checkpoint names as best, the best first."""
    tree = SavedState(path).outline()
    captured.check(tree, str(path), ("plugins",))
    for state in tree["plugins"].values():
        match state:
            case {"monitor": str(), "mode": str(), "best": [*entries]}:
                return [entry["update"] for entry in entries if isinstance(entry, dict) and "update" in entry]
    return []
