"""TarShards: WebDataset-style tar archives as a dataset with indices, read in place and never unpacked."""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from forge.data.order import epoch_order
from forge.errors import DataError
from forge.rng import combine_seeds

Sample = dict[str, Any]

KEY = "__key__"
_BLOCK = tarfile.BLOCKSIZE
_OPEN_AT_ONCE = 64
_LONGEST_NAME = 1 << 20
_EXTENSION = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_PAX_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=")
_LONG_NAME = tarfile.GNUTYPE_LONGNAME
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_NOT_USED = (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}


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
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        decode: Callable[[Sample], Any] | None = None,
        shuffle_block: int = 1000,
    ):
        if shuffle_block < 1:
            raise DataError(f"TarShards: shuffle_block is {shuffle_block}; it must be at least 1.")
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        self.shards = [shard for pattern in several for shard in _expanded(os.fspath(pattern))]
        if not self.shards:
            raise DataError("TarShards got an empty list of archives. Check the pattern that made it.")
        self.decode, self.shuffle_block = decode, shuffle_block
        self.pure = decode is None
        "Whether reading draws no random numbers; set it to True if `decode` draws none, to save the time of seeding."
        self._index: _Index | None = None
        self._open: OrderedDict[int, _Handle] = OrderedDict()

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
        for shard in epoch_order(len(self.shards), seed, epoch).tolist():
            for start in range(firsts[shard], firsts[shard + 1], self.shuffle_block):
                size = min(self.shuffle_block, firsts[shard + 1] - start)
                blocks.append(torch.randperm(size, generator=generator).add_(start))
        return torch.cat(blocks)

    @property
    def index(self) -> _Index:
        """The location of every file of every sample, read at the first use."""
        if self._index is None:
            self._index = _Index.of(self.shards)
        return self._index

    def _handle(self, shard: int) -> _Handle:
        """Return the open archive; close the least recently used one beyond the limit of open files."""
        handle = self._open.pop(shard, None) or _Handle(self.shards[shard], self.index.sizes[shard])
        self._open[shard] = handle
        if len(self._open) > _OPEN_AT_ONCE:
            self._open.popitem(last=False)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the index, so that workers need not read it again, and no open files."""
        return self.__dict__ | {"_open": OrderedDict()}


class _Handle:
    """An archive open for reading at given offsets, without a file position that threads or forks could disturb."""

    def __init__(self, path: str, size: int):
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
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

    @classmethod
    def of(cls, shards: list[str]) -> _Index:
        samples_in, sizes = [], []
        files_in, names, name_ends = [0], bytearray(), [0]
        offsets, lengths, extension = [], [], []
        numbers: dict[str, int] = {}
        for path in shards:
            samples = _samples(path)
            samples_in.append(len(samples))
            sizes.append(os.path.getsize(path))
            for key, files in samples.items():
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
            sizes=sizes,
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


class _Member(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int
    size: int


def _samples(path: str) -> dict[str, dict[str, _Member]]:
    """Return the files of each key, by extension, in the order in which keys first appear."""
    samples: dict[str, dict[str, _Member]] = {}
    for member in _members(path):
        parts = _EXTENSION.fullmatch(member.name)
        if parts is None:
            continue
        key, extension = parts[1], parts[2].lower()
        if extension == KEY:
            raise _bad(path, member.name, f"has the extension {KEY!r}, which is reserved for the key. Rename it.")
        files = samples.setdefault(key, {})
        if extension in files:
            raise _bad(path, member.name, "occurs twice (extensions are compared in lower case). Keep one of them.")
        files[extension] = member
    return samples


def _members(path: str) -> Iterator[_Member]:
    """Yield the regular files of an archive, by its headers alone, which are checked for plausibility."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _refuse_compressed(path, file.read(_BLOCK))
        offset, extended = 0, {}  # extended: the records of extended headers for the next member
        while (header := _header(path, file, offset, size)) is not None:
            extends = header.type == _LONG_NAME or header.type in _PAX or header.type in _NOT_USED
            name = header.name if extends else extended.get("path", header.name)
            start, length = offset + _BLOCK, header.size if extends else int(extended.get("size", header.size))
            if header.type == tarfile.DIRTYPE:
                length = 0  # a directory's size is no data
            if length < 0 or start + length > size:
                raise _bad(path, name, f"should have {length} bytes, but the archive ends before. Fetch it again.")
            offset = start + -(-length // _BLOCK) * _BLOCK
            if header.type == _LONG_NAME:
                extended["path"] = _text(_extra(path, file, length)).rstrip("\0")
            elif header.type in _PAX:
                extended |= _pax_records(path, _extra(path, file, length))
            elif not extends:
                if _is_regular(path, name, header, extended):
                    yield _Member(name, start, length)
                extended = {}


def _header(path: str, file: io.BufferedReader, offset: int, size: int) -> tarfile.TarInfo | None:
    """Return the header at `offset`, or None at the end-of-archive mark."""
    file.seek(offset)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        raise DataError(
            f"TarShards: {path!r} is cut short: no end-of-archive mark after {size} bytes. Fetch it again, or close "
            "the writer that made it."
        )
    if not any(block):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise DataError(f"TarShards: {path!r} is no tar archive, or is damaged at byte {offset}: {error}.") from error


def _extra(path: str, file: io.BufferedReader, length: int) -> bytes:
    """Read the data of a header that describes the next one."""
    if length > _LONGEST_NAME:
        raise DataError(f"TarShards: {path!r} has a header of {length} bytes: damaged, or malicious.")
    return file.read(length)


def _pax_records(path: str, data: bytes) -> dict[str, str]:
    """Return `path`, `size` and the marks of sparse files from a PAX header: lines of `length key=value`."""
    records: dict[str, str] = {}
    place, end = 0, len(data.rstrip(b"\0"))
    while place < end:
        match = _PAX_RECORD.match(data, place)
        length = int(match[1]) if match else 0
        if match is None or not match.end() < place + length <= len(data):
            raise DataError(f"TarShards: {path!r} has a damaged PAX header. Write the archive again.")
        key, value = _text(match[2]), _text(data[match.end() : place + length - 1])
        if key == "size" and not re.fullmatch("[0-9]{1,19}", value):
            raise DataError(f"TarShards: {path!r} has a PAX header with a size that is no number. Write it again.")
        if key in ("path", "size") or key.startswith("GNU.sparse"):
            records[key] = value
        place += length
    return records


def _is_regular(path: str, name: str, header: tarfile.TarInfo, extended: dict[str, str]) -> bool:
    """Whether a member is a file rather than a directory; anything else is refused."""
    sparse = header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in extended)
    if header.type in tarfile.REGULAR_TYPES and not sparse:
        return True
    if header.type == tarfile.DIRTYPE:
        return False
    fix = "Pack the file itself: tar --dereference --hard-dereference."
    raise _bad(path, name, f"is a link, a device or a sparse file, without data of its own. {fix}")


def _refuse_compressed(path: str, head: bytes) -> None:
    for magic, tool in _COMPRESSED.items():
        if head.startswith(magic):
            raise DataError(
                f"TarShards: {path!r} is compressed, so samples cannot be read alone. Unpack it once: {tool} {path}"
            )


def _bad(path: str, member: str, what: str) -> DataError:
    return DataError(f"TarShards: in {path!r} the member {member!r} {what}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


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
