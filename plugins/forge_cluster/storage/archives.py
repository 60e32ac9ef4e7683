"""Archives at URLs: fetched whole when they are needed, compared with what is known of them, kept in a bounded folder.

Workers and ranks of one host share the folder. An archive is fetched by one process, while the others wait for its lock
file; before that, room is made by removing those that were not used for longest.

Who makes room asks no reader: an archive may be gone at any moment. So a reader never looks first and opens then. It
opens what is there, or fetches the archive and opens it before others can see it. What is open stays readable until it
is closed. Names change only under `room.lock`, so that who counts the room counts each archive once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint.hashing import new_hash
from forge.errors import DataError
from forge.util.text import format_bytes
from forge_cluster.storage.object_storage import Unreachable, attempt, connect, redacted

logger = logging.getLogger("forge")

DOWNLOADS = 2
"""How often an archive is downloaded if it differs from what is known of it: once may be the network's fault."""
AT_ONCE = 16
"""Threads that ask for sizes and indices."""
AHEAD = 2
"""Archives that are fetched before they are needed."""
_WAIT = 0.1
_PART = re.compile(r".*\.(\d+)\.part")


def default_folder() -> Path:
    """Return the folder of users who name none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge" / "shards"


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """An archive at a URL, as it was when the dataset was made."""

    url: str
    size: int
    version: str
    "What changes when the archive does: its ETag or its time."

    @property
    def name(self) -> str:
        """Its name in a cache: an archive that has changed has another."""
        known = hashlib.sha256(f"{self.url} {self.size} {self.version}".encode()).hexdigest()
        return f"{known[:20]}.tar"


def find_shards(urls: Sequence[str]) -> list[list[RemoteShard]]:
    """Return the archives of each URL, which may have wildcards; matches of a wildcard are sorted."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(_found, urls))


def _found(url: str) -> list[RemoteShard]:
    fs, path = _connected(url)
    wild = "*" in path or "[" in path  # a question mark begins the query of a web address
    try:
        infos = _tried(url, lambda: list(fs.glob(path, detail=True).values()) if wild else [fs.info(path)])
    except FileNotFoundError:
        infos = []
    files = sorted((info for info in infos if info["type"] == "file"), key=lambda info: info["name"])
    if not files:
        raise DataError(f"TarShards: no archive {redacted(url)!r}. Check the URL.")
    if any(info.get("size") is None for info in files):
        raise DataError(f"TarShards: the server does not say how large {redacted(url)!r} is. Fetch it to a disk.")
    urls = [fs.unstrip_protocol(info["name"]) if wild else url for info in files]
    return [RemoteShard(url, int(info["size"]), _version(info)) for url, info in zip(urls, files, strict=True)]


def _version(info: dict[str, Any]) -> str:
    known = (info.get(key) for key in ("ETag", "etag", "generation", "LastModified", "last_modified", "mtime"))
    return str(next((value for value in known if value), ""))


class ShardCache:
    """A folder of archives that were fetched, of at most `limit` bytes."""

    def __init__(self, folder: Path | None, limit: int):
        self.folder, self.limit = folder or default_folder(), limit

    def open(self, shard: RemoteShard, sha256: str | None = None) -> int:
        """Return a descriptor of the archive, which is fetched if it is not here; with a hash it is compared."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(f"{shard.name}.lock"):
                path = self.folder / shard.name
                try:
                    os.utime(path)  # the time of its last use
                    return os.open(path, os.O_RDONLY)
                except FileNotFoundError:
                    return self._fetch(shard, path, sha256)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DataError(
                    f"TarShards: no space left in {str(self.folder)!r} for {redacted(shard.url)!r}. Name another "
                    "folder (cache=) or a smaller limit (cache_gb=)."
                ) from error
            raise DataError(f"TarShards: the cache {str(self.folder)!r} cannot be used: {error}.") from error

    def has(self, shard: RemoteShard) -> bool:
        return (self.folder / shard.name).exists()

    def used(self) -> int:
        """Return the bytes of all archives here, and of those that are being fetched."""
        if not self.folder.exists():
            return 0
        with self._locked("room.lock"):
            return sum(size for _, size in self._files())

    def _fetch(self, shard: RemoteShard, path: Path, sha256: str | None) -> int:
        """Return a descriptor of an archive that is fetched; who calls holds its lock."""
        part = self.folder / f"{shard.name}.{shard.size}.part"
        self._make_room(shard, part)
        try:
            fs, there = _connected(shard.url)

            def download() -> None:
                fs.get_file(there, str(part))
                if part.stat().st_size != shard.size:
                    raise OSError(f"{part.stat().st_size:,} of {shard.size:,} bytes arrived")

            for _ in range(DOWNLOADS):
                _tried(shard.url, download)
                if sha256 is None or file_hash(part) == sha256:
                    return self._published(part, path)
        except FileNotFoundError as error:
            raise DataError(f"TarShards: {redacted(shard.url)!r} is no longer there: {error}.") from error
        finally:
            part.unlink(missing_ok=True)
        raise DataError(
            f"TarShards: {redacted(shard.url)!r} is damaged, or has changed since it was listed: its content does "
            "not match its hash. Create the dataset again; if an index lies beside it, write that again too "
            "(TarShards.write_index)."
        )

    def _published(self, part: Path, path: Path) -> int:
        """Give a whole archive its name, and return a descriptor of it: once it has the name, others may remove it."""
        descriptor = os.open(part, os.O_RDONLY)
        try:
            with self._locked("room.lock"):
                os.replace(part, path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _make_room(self, shard: RemoteShard, part: Path) -> None:
        """Remove what was not used for longest, and reserve the room; wait while others fetch what fills it."""
        if shard.size > self.limit:
            raise DataError(
                f"TarShards: {redacted(shard.url)!r} has {format_bytes(shard.size)}, more than the cache may hold "
                f"({format_bytes(self.limit)}). Raise cache_gb, or write smaller archives."
            )
        while True:
            with self._locked("room.lock"):
                # a part of this archive was left by a process that was killed: this one holds the archive's lock
                files = [file for file in self._files() if file[0] != part]
                used = sum(size for _, size in files)
                for path, size in sorted(files, key=lambda file: _last_use(file[0])):
                    if used + shard.size <= self.limit:
                        break
                    if path.suffix != ".part" or self._is_left_behind(path):
                        path.unlink(missing_ok=True)
                        used -= size
                if used + shard.size <= self.limit:
                    part.touch()
                    return
            time.sleep(_WAIT)

    def _files(self) -> list[tuple[Path, int]]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.folder):
                match = _PART.fullmatch(entry.name)
                if match:
                    found.append((Path(entry.path), int(match[1])))
                elif entry.name.endswith(".tar"):
                    with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                        found.append((Path(entry.path), entry.stat().st_size))
        return found

    def _is_left_behind(self, part: Path) -> bool:
        """Return whether the process that was fetching has ended: its lock is free."""
        import fcntl  # not available on every platform

        name = part.name.split(".tar", 1)[0]
        with open(self.folder / f"{name}.tar.lock", "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(file, fcntl.LOCK_UN)
            return True

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        import fcntl  # not available on every platform

        with open(self.folder / name, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # not by closing: a forked process may hold the file too

    # -- small files beside the archives ------------------------------------------------------------------------------

    def index_of(self, shard: RemoteShard) -> bytes | None:
        """Return the index of an archive: the one that is kept here, else the one that lies beside it."""
        kept = self.folder / f"{shard.name}.index"
        with contextlib.suppress(FileNotFoundError):
            return kept.read_bytes()
        fs, path = _connected(shard.url)
        try:
            data = _tried(shard.url, lambda: fs.cat_file(f"{path}.index"))
        except FileNotFoundError:
            return None
        self.keep_index(shard, data)
        return data

    def keep_index(self, shard: RemoteShard, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f"{shard.name}.index.{os.getpid()}.{threading.get_ident()}"
        partial.write_bytes(data)
        os.replace(partial, self.folder / f"{shard.name}.index")


def write_beside(url: str, data: bytes) -> None:
    """Write the index of an archive beside it."""
    fs, path = _connected(url)
    _tried(url, lambda: fs.pipe_file(f"{path}.index", data))


class ReadAhead:
    """A thread that fetches the archives that come next in an order, a few before the one in use."""

    def __init__(self, owner: Any, order: Sequence[int]):
        self._owner, self._order = weakref.ref(owner), list(order)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-shards", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        places = {shard: place for place, shard in enumerate(self._order)}
        while not self._stop.wait(_WAIT):
            owner = self._owner()
            if owner is None:
                return
            at = places.get(owner.in_use, 0)
            for shard in self._order[at + 1 : at + 1 + AHEAD]:
                owner.fetch_ahead(shard)
            if at + 1 >= len(self._order):
                return
            del owner


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def file_hash(file: Path | int) -> str:
    """Return the SHA-256 of a file, by its path or a descriptor."""
    digest = new_hash()
    with open(file, "rb", closefd=not isinstance(file, int)) as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _connected(url: str) -> tuple[Any, str]:
    try:
        return connect(url)
    except ValueError as error:
        raise DataError(f"TarShards: {error}") from error


def _tried(url: str, act: Any) -> Any:
    try:
        return attempt(act)
    except Unreachable as error:
        if error.missing:
            raise FileNotFoundError(f"{redacted(url)}: {error}") from None
        raise DataError(f"TarShards: {redacted(url)!r} cannot be read: {error}.") from None
