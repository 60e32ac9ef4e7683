"""Weights at URLs: downloaded, verified, into a temporary folder in the layout of a run, and read there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.checkpoint.checkpoint import NAME
from forge.checkpoint.foreign import SUFFIXES
from forge.errors import CheckpointError, TaskError
from forge_cluster.storage.object_storage import CREDENTIALS, RemoteFailure, RemoteMissing, check_url
from forge_cluster.storage.remote import RemoteCheckpoints

FILE = "weights.safetensors"
CHECKPOINTS = "checkpoints"


@contextmanager
def downloaded(url: str, average: bool, update_of: Callable[[Path], float]) -> Iterator[Path]:
    """Download a weights file, a checkpoint, or what a run folder has of them; the local path exists inside the `with`.

    Of a run, the newest checkpoint is downloaded only if it is newer than the weights file (`update_of` reads that), or
    if an `average` is wanted, which a file may not have.
    """
    check_url(url, "weights")
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="forge-weights-") as folder:
        target = Path(folder) / name
        try:
            if match := NAME.fullmatch(name):
                RemoteCheckpoints(parent).fetch(int(match[1]), target)
            elif target.suffix in (".safetensors", *SUFFIXES):
                RemoteCheckpoints(parent).download(name, target)
            else:
                _download_run(url, target, average, update_of)
        except RemoteMissing as error:
            raise TaskError(f"There is no weights file at {url}. Check the bucket and the name.") from error
        except RemoteFailure as error:
            raise CheckpointError(f"{error} {CREDENTIALS}") from error
        yield target


def _download_run(url: str, target: Path, average: bool, update_of: Callable[[Path], float]) -> None:
    place = RemoteCheckpoints(url)
    there, file = place.names(), target / FILE
    target.mkdir()
    if FILE in there:
        place.download(FILE, file)
    inner = RemoteCheckpoints(f"{url}/{CHECKPOINTS}") if CHECKPOINTS in there else place
    newest = inner.newest()
    if newest is not None and (FILE not in there or average or newest > update_of(file)):
        inner.fetch(newest, target / CHECKPOINTS / f"update-{newest:08d}")
    elif FILE not in there:
        raise TaskError(
            f"There are no weights at {url}: neither {FILE} nor a complete checkpoint. Give the URL of a run folder, "
            "of the place that checkpoint.remote names, of one of its checkpoints (…/update-00001000), or of a file."
        )
