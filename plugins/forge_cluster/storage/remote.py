"""Checkpoints in object storage: any place that fsspec knows by URL (s3://, gs://, az://, file://, memory://).

Object stores rename nothing and have no folders, so a checkpoint counts as complete once its manifest is there: files
are uploaded first, the manifest last, and it is the first to be removed. A manifest contains its own hash, so a torn
one does not count. What is fetched is compared with the manifest, as on disk.
"""

from __future__ import annotations

import logging
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from forge.checkpoint import manifest, publish, temp_names
from forge.checkpoint.checkpoint import NAME
from forge.checkpoint.hashing import new_hash
from forge.errors import CheckpointError
from forge.util.files import access, make_folder, sync_directory
from forge_cluster.storage.object_storage import Unreachable, attempt, check_url, connect

logger = logging.getLogger("forge")

T = TypeVar("T")

DOWNLOADS = 2
"""How often a file is downloaded if it differs from the manifest: once may be the network's fault."""
RANGE, AT_ONCE = 2**26, 4
"""Bytes of a large file that are asked for together, and how many such ranges at a time."""
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"})
"""Places without folders. To make one there could make a bucket."""


class RemoteCheckpoints:
    """The checkpoints of one run at a URL. Every operation is tried several times."""

    def __init__(self, url: str, sleep: Callable[[float], object] = time.sleep):
        check_url(url, "The place of remote checkpoints")
        self.url = url.rstrip("/")
        self._sleep = sleep
        try:
            self._fs, self._root = connect(self.url)
        except ValueError as error:
            raise CheckpointError(f"{error}") from error
        own = self._fs.protocol
        self._has_folders = OBJECT_STORES.isdisjoint([own] if isinstance(own, str) else own)

    # -- listing ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all files and folders."""
        return self._try("list", lambda: self._names(""))

    def updates(self) -> list[int]:
        """Return the updates of all checkpoints whose manifest is there, in order."""
        found = sorted(int(match[1]) for name in self.names() if (match := NAME.fullmatch(name)))
        return [update for update in found if self.manifest(update) is not None]

    def leftovers(self) -> list[int]:
        """Return the updates of which any file is there."""
        return sorted(int(match[1]) for name in self.names() if (match := NAME.fullmatch(name)))

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
        """Remove the manifest of a checkpoint, so that it no longer counts."""
        self._remove(f"{_folder(update)}/{manifest.NAME}")

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

    def remove(self, update: int) -> None:
        """Remove a checkpoint, complete or not; what is interrupted here no longer counts."""
        self.withdraw(update)
        for name in self._try("list", lambda: self._names(_folder(update))):
            self._remove(f"{_folder(update)}/{name}")
        if self._has_folders:
            with suppress(Exception):  # an empty folder does no harm
                self._fs.rmdir(self._path(_folder(update)))

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
                for name, record in records.items():
                    self._download(f"{_folder(update)}/{name}", partial / name, record)
                publish.write_file(partial / manifest.NAME, [memoryview(data)])
                sync_directory(partial)
                publish.move_into_place(partial, target, aside)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise

    def download(self, name: str, target: Path) -> None:
        """Download a file that no manifest records; its size must be that which the place tells."""

        def get() -> None:
            self._fs.invalidate_cache()
            size = self._fs.info(self._path(name))["size"]
            self._fs.get_file(self._path(name), str(target))
            if target.stat().st_size != size:
                raise OSError(f"{target.stat().st_size:,} of {size:,} bytes arrived")

        self._try(f"read {name}", get)

    def _download(self, name: str, target: Path, record: manifest.FileRecord) -> None:
        problem = ""
        for _ in range(DOWNLOADS):
            try:
                self._get(name, target, record.size)
            except RemoteMissing as error:
                raise CheckpointError(f"{self.url}/{name} is missing.") from error
            problem = _difference(target, record)
            if not problem:
                os.chmod(target, access(target, 6))
                return
        raise CheckpointError(f"{self.url}/{name} is damaged: {problem}.")

    def _get(self, name: str, target: Path, size: int) -> None:
        """Download a file, a large one in ranges, several at a time: one that fails is tried again alone."""
        path = self._path(name)
        if size <= RANGE:
            self._try(f"read {name}", lambda: self._fs.get_file(path, str(target)))
            return
        with open(target, "wb") as stream, ThreadPoolExecutor(AT_ONCE) as pool:
            file = stream.fileno()

            def read(begin: int) -> None:
                def get() -> bytes:
                    found = self._fs.cat_file(path, start=begin, end=min(begin + RANGE, size))
                    if len(found) != min(RANGE, size - begin):
                        raise OSError(f"{len(found):,} bytes of a range arrived")
                    return found

                os.pwrite(file, self._try(f"read {name} from byte {begin:,}", get), begin)

            for done in [pool.submit(read, begin) for begin in range(0, size, RANGE)]:
                done.result()

    # -- one operation ------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    def _names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()  # other processes write here too
        try:
            found = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return [posixpath.basename(str(path).rstrip("/")) for path in found]

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

    def _remove(self, name: str) -> None:
        def remove() -> None:
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        self._try(f"remove {name}", remove)

    def _try(self, what: str, act: Callable[[], T]) -> T:
        """Call a function until it succeeds; raise its last error."""
        try:
            return attempt(act, self._sleep, lambda said: logger.debug("%s: could not %s (%s)", self.url, what, said))
        except Unreachable as error:
            kind = RemoteMissing if error.missing else RemoteFailure
            raise kind(f"{self.url}: could not {what}: {error}.") from None


class RemoteFailure(CheckpointError):
    """A remote place did not answer, or refused. What is there is intact."""


class RemoteMissing(RemoteFailure):
    """A remote file, or its bucket, does not exist."""


def _folder(update: int) -> str:
    return f"update-{update:08d}"


def _difference(file: Path, record: manifest.FileRecord) -> str:
    """Say how a file differs from its record; empty if it does not."""
    digest, size = new_hash(), 0
    with open(file, "rb+") as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
            size += len(piece)
        os.fsync(stream.fileno())
    if size != record.size:
        return f"it has {size:,} bytes, not {record.size:,}"
    return "" if digest.hexdigest() == record.sha256 else "its content does not match its hash"
