"""Checkpoints in object storage: any place that fsspec knows by URL (s3://, gs://, az://, file://, memory://).

Object stores rename nothing and have no folders, so a checkpoint counts as complete once its manifest is there: files
are uploaded first, the manifest last. A manifest contains its own hash, so a torn one does not count; other
bytes in its place withdraw a checkpoint, also where nothing may be removed. What is fetched is verified as on disk.
"""

from __future__ import annotations

import os
import posixpath
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from forge.checkpoint import StoredCheckpoint, manifest, publish, temp_names
from forge.checkpoint.checkpoint import NAME
from forge.errors import CheckpointError
from forge.util.files import access, make_folder, sync_directory
from forge_cluster.storage.object_storage import RemoteMissing, attempt, check_url, connect

T = TypeVar("T")

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"})
"""Places without folders. To make one there could make a bucket."""


class RemoteCheckpoints:
    """The checkpoints of one run at a URL. Every operation is tried several times."""

    def __init__(self, url: str):
        check_url(url, "The place of remote checkpoints")
        self.url = url.rstrip("/")
        self._fs, self._root = connect(self.url)
        own = self._fs.protocol
        self._has_folders = OBJECT_STORES.isdisjoint([own] if isinstance(own, str) else own)

    # -- listing ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all files and folders."""

        def listed() -> list[str]:
            self._fs.invalidate_cache()  # other processes write here too
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return [posixpath.basename(str(path).rstrip("/")) for path in found]

        return self._try("list", listed)

    def updates(self) -> list[int]:
        """Return the updates of which anything is there, in order; those with a `manifest` are complete."""
        return sorted(int(match[1]) for name in self.names() if (match := NAME.fullmatch(name)))

    def newest(self) -> int | None:
        """Return the newest update whose checkpoint is complete."""
        return next((update for update in reversed(self.updates()) if self.manifest(update) is not None), None)

    def manifest(self, update: int) -> bytes | None:
        """Return the manifest of a checkpoint; None if it is not there or torn."""
        data = self.read(f"{_folder(update)}/{manifest.NAME}")
        if data is not None:
            with suppress(CheckpointError):
                manifest.decode(data, manifest.NAME)
                return data
        return None

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        try:
            return self._try(
                f"read {name}", lambda: self._fs.cat_file(self._path(name), start=0, end=manifest.MAX_SIZE)
            )
        except RemoteMissing:
            return None

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._try(f"write {name}", lambda: self._written(name, lambda path: self._fs.pipe_file(path, data), len(data)))

    def withdraw(self, update: int) -> None:
        """Let a checkpoint no longer count."""
        self.write(f"{_folder(update)}/{manifest.NAME}", b"withdrawn")

    def upload(self, folder: Path, names: Collection[str]) -> None:
        """Upload files of a local checkpoint, its manifest not among them."""
        for name in names:
            source, target = folder / name, f"{folder.name}/{name}"
            size = source.stat().st_size

            def put(path: str, source: Path = source) -> None:
                self._fs.put_file(str(source), path)

            self._try(f"write {target}", lambda put=put, target=target, size=size: self._written(target, put, size))

    def publish(self, update: int, data: bytes) -> None:
        """Write the manifest of a checkpoint, whose files are all there."""
        self.write(f"{_folder(update)}/{manifest.NAME}", data)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def fetch(self, update: int, target: Path) -> None:
        """Download a checkpoint to the directory `target`, verified, under a temporary name until it is complete."""
        where = f"{self.url}/{_folder(update)}"
        data = self.manifest(update)
        if data is None:
            raise CheckpointError(f"{where} is incomplete: it has no {manifest.NAME}.")
        records = manifest.decode(data, f"{where}/{manifest.NAME}")
        with temp_names.temporary(target) as (partial, aside):
            try:
                make_folder(target.parent)
                publish.make_directory(partial)
                for name in records:
                    self.download(f"{_folder(update)}/{name}", partial / name)
                publish.write_file(partial / manifest.NAME, [memoryview(data)])
                StoredCheckpoint(partial).verify()
                sync_directory(partial)
                publish.move_into_place(partial, target, aside)
            except RemoteMissing as error:
                raise CheckpointError(f"{where} lacks a file that its manifest names. {error}") from error
            except CheckpointError as error:
                raise type(error)(str(error).replace(str(partial), where)) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # where it is not in its place

    def download(self, name: str, target: Path) -> None:
        """Download a file; its size must be that which the place tells."""

        def get() -> None:
            self._fs.invalidate_cache()
            size = self._fs.info(self._path(name))["size"]
            self._fs.get_file(self._path(name), str(target))
            if target.stat().st_size != size:
                raise OSError(f"{target.stat().st_size:,} of {size:,} bytes arrived")

        self._try(f"read {name}", get)
        with open(target, "rb+") as stream:
            os.fsync(stream.fileno())
        os.chmod(target, access(target, 6))

    # -- one operation ------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    def _written(self, name: str, write: Callable[[str], object], size: int) -> None:
        """Write a file and compare its size: a store may accept a part without an error."""
        path = self._path(name)
        if self._has_folders:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        write(path)
        self._fs.invalidate_cache()
        there = self._fs.info(path)["size"]
        if there != size:
            raise OSError(f"{there:,} of {size:,} bytes arrived")

    def _try(self, what: str, act: Callable[[], T]) -> T:
        """Call a function until it succeeds; raise its last error."""
        return attempt(act, f"{self.url}: could not {what}")


def _folder(update: int) -> str:
    return f"update-{update:08d}"
