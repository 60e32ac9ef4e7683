"""TarShards: WebDataset-style tar archives as a dataset with indices, read in place and never unpacked."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from forge import registry
from forge.data.order import epoch_order
from forge.data.tar_headers import KEY, TarMember, samples_of
from forge.errors import DataError
from forge.rng import combine_seeds

Sample = dict[str, Any]

_OPEN_AT_ONCE = 64
_READ_AT_ONCE = 16
_OPEN_FROM_CACHE = 4
"""Archives of a cache that a process keeps open: what is open takes space even when the cache has removed it."""


def decode_basic(sample: Sample) -> Sample:
    """Decode `txt` to str, `json` to plain data, `cls` to int, `npy` to an array; the rest stays bytes.

    The last part of an extension counts, so `meta.json` is json. Arrays of Python objects are refused, since reading
    them would run code from the file.
    """
    return {key: _decoded(key, value) for key, value in sample.items()}


class TarShards(Dataset[Any]):
    """The samples of tar archives whose files are named `key.ext`: all files of one key in a shard are one sample.

    ::

        shards = TarShards("data-{000..012}.tar", decode=lambda s: (decode_jpeg(s["jpg"]), int(s["cls"])))
        loader = forge.data.Loader(shards, batch_size=64, shuffle=True, num_workers=4)

    `paths` is a name with braces (`{000..012}`, `{a,b}`) or wildcards, or a list of such names. A sample is a dict,
    `{"__key__": key, "jpg": bytes, "cls": bytes}`, that `decode` maps to the result; the default is `decode_basic`.
    Names inside an archive are only keys: nothing is written to disk.

    The headers are read once, at the first use; then a sample is one read at a known offset, in any process. Files
    without an extension, hidden files and directories are skipped. Archives must be uncompressed.

    A name may be a URL that fsspec knows: `TarShards("s3://bucket/data-{000..099}.tar", cache="/scratch/shards",
    cache_gb=50)`. Archives are then fetched whole when they are needed, the next ones ahead of time, and kept in the
    folder `cache` (default: forge's cache in the home folder) up to `cache_gb`; workers and ranks of a host share it.
    Without an index beside them, all are fetched once to read their headers: `write_index()` writes one beside each.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        decode: Callable[[Sample], Any] | None = None,
        shuffle_block: int = 1000,
        cache: str | os.PathLike[str] | None = None,
        cache_gb: float = 20.0,
    ):
        if shuffle_block < 1:
            raise DataError(f"TarShards: shuffle_block is {shuffle_block}; it must be at least 1.")
        if not cache_gb > 0:
            raise DataError(f"TarShards: cache_gb is {cache_gb:g}; it must be above 0.")
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        found = _found([os.fspath(pattern) for pattern in several])
        self.shards = [shard if isinstance(shard, str) else shard.url for shard in found]
        if not self.shards:
            raise DataError("TarShards got an empty list of archives. Check the pattern that made it.")
        self.decode, self.shuffle_block = decode, shuffle_block
        self.pure = decode is None
        "Whether reading draws no random numbers; set it to True if `decode` draws none, to save the time of seeding."
        self._index: _Index | None = None
        self._open: OrderedDict[int, _Handle] = OrderedDict()
        self._remote = {number: shard for number, shard in enumerate(found) if not isinstance(shard, str)}
        self._place = torch.tensor([0, 0])
        "The archive in use, and whether an order was asked for; shared with workers where archives are elsewhere."
        self._cache: Any = None
        "Archives that were fetched from elsewhere."
        if self._remote:
            self._cache = _elsewhere().ShardCache(None if cache is None else Path(cache), int(cache_gb * 1e9))
            self._place.share_memory_()
        self._ahead: Any = None

    def __len__(self) -> int:
        return len(self.index.shard)

    def __getitem__(self, position: int) -> Any:
        index = self.index
        if not -len(self) <= position < len(self):
            raise IndexError(f"TarShards has {len(self)} samples; {position} is out of range.")
        position %= len(self)
        shard, key = int(index.shard[position]), index.key(position)
        handle = self._handle(shard)
        sample: Sample = {KEY: key}
        for extension, offset, size in index.files(position):
            sample[extension] = handle.read(offset, size, f"{key}.{extension}")
        try:
            return decode_basic(sample) if self.decode is None else self.decode(sample)
        except Exception as error:
            where = f"sample {key!r} of {self.shards[shard]!r}"
            if self.decode is None:
                raise DataError(f"TarShards: {where} cannot be decoded: {error}") from error
            error.add_note(f"forge: raised by TarShards.decode for {where}.")
            raise

    def shuffled(self, seed: int, epoch: int) -> torch.Tensor:
        """Return every index once, in an order that reads nearly sequentially and depends on (seed, epoch) only.

        Shards come in random order; inside a shard, samples are shuffled in blocks of `shuffle_block`.
        """
        generator = torch.Generator().manual_seed(combine_seeds(seed, epoch))
        firsts = self.index.first_samples
        blocks = [torch.empty(0, dtype=torch.int64)]
        order = epoch_order(len(self.shards), seed, epoch).tolist()
        self._fetch_in(order)
        for shard in order:
            for start in range(firsts[shard], firsts[shard + 1], self.shuffle_block):
                size = min(self.shuffle_block, firsts[shard + 1] - start)
                blocks.append(torch.randperm(size, generator=generator).add_(start))
        return torch.cat(blocks)

    def write_index(self) -> None:
        """Write an index beside each archive at a URL: its samples and its hash. Datasets need not fetch all then."""
        for number, shard in self._remote.items():
            _elsewhere().write_beside(shard.url, self._read_remote(number).encoded())

    @property
    def index(self) -> _Index:
        """The location of every file of every sample, read at the first use."""
        if self._index is None:
            with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
                remote = dict(zip(self._remote, threads.map(self._read_remote, self._remote), strict=True))
            read = [remote.get(number) or _ShardIndex.of(path) for number, path in enumerate(self.shards)]
            self._index = _Index.of(self.shards, read)
        return self._index

    @property
    def in_use(self) -> int:
        """The archive that was opened last, by any worker."""
        return int(self._place[0])

    def fetch_ahead(self, number: int) -> None:
        """Fetch an archive that is needed soon, if the cache has room for it beside those in use."""
        shard = self._remote.get(number)
        largest = max((shard.size for shard in self._remote.values()), default=0)
        if shard is None or self._cache.has(shard) or (_elsewhere().AHEAD + 2) * largest > self._cache.limit:
            return
        with contextlib.suppress(Exception):  # who needs it will meet the error
            os.close(self._cache.open(shard, self.index.hashes[number]))

    def _fetch_in(self, order: list[int]) -> None:
        """Begin to fetch in the order of an epoch."""
        if self._remote:
            if self._ahead is not None:
                self._ahead.stop()
            self._place[0], self._place[1] = order[0], 1
            self._ahead = _elsewhere().ReadAhead(self, order)

    def _read_remote(self, number: int) -> _ShardIndex:
        shard = self._remote[number]
        data = self._cache.index_of(shard)
        if data is not None:
            return _ShardIndex.decoded(data, shard)
        descriptor = self._cache.open(shard)
        try:
            read = _ShardIndex.of(shard.url, descriptor)
        finally:
            os.close(descriptor)
        self._cache.keep_index(shard, read.encoded())
        return read

    def _handle(self, shard: int) -> _Handle:
        """Return the open archive; close the least recently used one beyond the limit of open files."""
        handle = self._open.pop(shard, None) or self._opened(shard)
        self._open[shard] = handle
        if len(self._open) > (_OPEN_FROM_CACHE if self._remote else _OPEN_AT_ONCE):
            self._open.popitem(last=False)
        return handle

    def _opened(self, number: int) -> _Handle:
        path, size = self.shards[number], self.index.sizes[number]
        if number not in self._remote:
            return _Handle(path, size, os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
        handle = _Handle(path, size, self._cache.open(self._remote[number], self.index.hashes[number]))
        self._place[0] = number
        if not self._place[1]:  # in the order of the archives
            threading.Thread(target=self.fetch_ahead, args=(number + 1,), daemon=True).start()
        return handle

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the index, so that workers need not read it again, and no open files."""
        return self.__dict__ | {"_open": OrderedDict(), "_ahead": None}


class _Handle:
    """An archive open for reading at given offsets, without a file position that threads or forks could disturb."""

    def __init__(self, path: str, size: int, descriptor: int):
        self.path, self.descriptor = path, descriptor
        if os.fstat(self.descriptor).st_size != size:
            raise DataError(f"TarShards: {path!r} changed its size since it was indexed. Create the dataset again.")

    def read(self, offset: int, size: int, member: str) -> bytes:
        parts: list[bytes] = []
        while size:  # one call gives at most 2 GiB
            part = os.pread(self.descriptor, size, offset)
            if not part:
                raise DataError(f"TarShards: {self.path!r} ends inside the member {member!r}. Fetch the archive again.")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@dataclass(slots=True)
class _ShardIndex:
    """The samples of one archive."""

    samples: dict[str, dict[str, TarMember]]
    size: int
    sha256: str | None = None

    @classmethod
    def of(cls, path: str, opened: int | None = None) -> _ShardIndex:
        """Read the headers of an archive, and the hash of one that was fetched."""
        samples = samples_of(path, opened)
        if opened is None:
            return cls(samples, os.path.getsize(path))
        os.lseek(opened, 0, os.SEEK_SET)
        return cls(samples, os.fstat(opened).st_size, _elsewhere().file_hash(opened))

    def encoded(self) -> bytes:
        samples = {
            key: {extension: [member.offset, member.size] for extension, member in files.items()}
            for key, files in self.samples.items()
        }
        return json.dumps({"size": self.size, "sha256": self.sha256, "samples": samples}).encode()

    @classmethod
    def decoded(cls, data: bytes, shard: Any) -> _ShardIndex:
        """Read an index, which may be damaged, or of another archive."""
        fix = "Write it again (TarShards.write_index), or remove it."
        try:
            read = json.loads(data)
            samples = {
                str(key): {str(name): TarMember(str(name), int(at), int(size)) for name, (at, size) in files.items()}
                for key, files in read["samples"].items()
            }
            made = cls(samples, int(read["size"]), str(read["sha256"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"TarShards: {shard.url + '.index'!r} is no index of an archive: {error}. {fix}") from error
        members = [member for files in samples.values() for member in files.values()]
        inside = all(member.offset >= 0 <= member.size <= made.size - member.offset for member in members)
        if made.size != shard.size or not inside:
            raise DataError(f"TarShards: {shard.url + '.index'!r} is of another archive than the one there. {fix}")
        return made


@dataclass(slots=True)
class _Index:
    """The location of every file, in flat arrays: small for millions of samples, and shared with forked workers."""

    shard: np.ndarray
    "The shard of each sample."
    first_samples: list[int]
    "The first sample of each shard, and the count of all."
    first_files: np.ndarray
    "The first file of each sample, and the count of all."
    offsets: np.ndarray
    lengths: np.ndarray
    extension: np.ndarray
    "Of each file, as a number into `extensions`."
    extensions: list[str]
    names: bytes
    "All keys, joined."
    name_ends: np.ndarray
    sizes: list[int]
    "The size of each shard."
    hashes: list[str | None]
    "The SHA-256 of each shard that is fetched."

    @classmethod
    def of(cls, shards: list[str], read: list[_ShardIndex]) -> _Index:
        samples_in = []
        files_in, names, name_ends = [0], bytearray(), [0]
        offsets, lengths, extension = [], [], []
        numbers: dict[str, int] = {}
        for shard in read:
            samples_in.append(len(shard.samples))
            for key, files in shard.samples.items():
                names += key.encode("utf-8", "surrogateescape")
                name_ends.append(len(names))
                for name, member in files.items():
                    offsets.append(member.offset)
                    lengths.append(member.size)
                    extension.append(numbers.setdefault(name, len(numbers)))
                files_in.append(len(offsets))
        if not offsets:
            raise DataError(f"TarShards: no file named key.ext in {', '.join(map(repr, shards[:3]))}.")
        return cls(
            shard=np.repeat(np.arange(len(shards), dtype=np.int32), samples_in),
            first_samples=list(itertools.accumulate(samples_in, initial=0)),
            first_files=np.array(files_in, np.int64),
            offsets=np.array(offsets, np.int64),
            lengths=np.array(lengths, np.int64),
            extension=np.array(extension, np.int32),
            extensions=list(numbers),
            names=bytes(names),
            name_ends=np.array(name_ends, np.int64),
            sizes=[shard.size for shard in read],
            hashes=[shard.sha256 for shard in read],
        )

    def key(self, sample: int) -> str:
        return self.names[self.name_ends[sample] : self.name_ends[sample + 1]].decode("utf-8", "surrogateescape")

    def files(self, sample: int) -> Iterator[tuple[str, int, int]]:
        """Yield (extension, offset, size) of each file of a sample."""
        here = slice(self.first_files[sample], self.first_files[sample + 1])
        for number, offset, size in zip(
            self.extension[here].tolist(), self.offsets[here].tolist(), self.lengths[here].tolist(), strict=True
        ):
            yield self.extensions[number], offset, size


def is_url(name: str) -> bool:
    """Return whether a name is that of something elsewhere."""
    return "://" in name


def _elsewhere() -> Any:
    """The module of an installed package that fetches archives from URLs."""
    return registry.load("storage", "archives")


def _found(patterns: list[str]) -> list[Any]:
    """Return the archives of all patterns in their order: local ones as paths, others with `url` and `size`."""
    names = [name for pattern in patterns for name in (_without_braces(pattern) if is_url(pattern) else [pattern])]
    urls = [name for name in names if is_url(name)]
    remote = iter(_elsewhere().find_shards(urls) if urls else ())
    return [shard for name in names for shard in (next(remote) if is_url(name) else _expanded(name))]


def _expanded(pattern: str) -> list[str]:
    """Return the archives of a name with braces or wildcards; matches of wildcards are sorted."""
    found: list[str] = []
    for name in _without_braces(pattern):
        matches = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not matches or not all(map(os.path.isfile, matches)):
            raise DataError(f"TarShards: no archive {name!r}. Check the path and the working directory.")
        found += matches
    return found


def _without_braces(pattern: str) -> Iterator[str]:
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None or Path(pattern).exists():
        yield pattern
        return
    for choice in _choices(match[1], pattern):
        yield from _without_braces(pattern[: match.start()] + choice + pattern[match.end() :])


def _choices(inside: str, pattern: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if numbers is None and "," in inside:
        return inside.split(",")
    if numbers is None or int(numbers[1]) > int(numbers[2]):
        raise DataError(f"TarShards: {{{inside}}} in {pattern!r} is neither a range {{000..012}} nor a list {{a,b}}.")
    return [str(number).zfill(len(numbers[1])) for number in range(int(numbers[1]), int(numbers[2]) + 1)]


def _decoded(key: str, value: Any) -> Any:
    if key == KEY:
        return value
    try:
        match key.rsplit(".", 1)[-1]:
            case "txt":
                return value.decode("utf-8")
            case "json":
                return json.loads(value)
            case "cls":
                return int(value)
            case "npy":
                return np.lib.format.read_array(io.BytesIO(value), allow_pickle=False)
    except Exception as error:
        raise DataError(f"its {key!r} is no {key.rsplit('.', 1)[-1]} ({error})") from error
    return value
