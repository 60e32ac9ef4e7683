"""Find the samples of a tar archive by its headers alone. Archives that are broken or hostile are refused."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from forge.errors import DataError

KEY = "__key__"
_BLOCK = tarfile.BLOCKSIZE
_LONGEST_NAME = 1 << 20
_EXTENSION = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_PAX_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=")
_LONG_NAME = tarfile.GNUTYPE_LONGNAME
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_NOT_USED = (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}


class TarMember(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int
    size: int


def samples_of(path: str, opened: int | None = None) -> dict[str, dict[str, TarMember]]:
    """Return the files of each key, by extension, in the order in which keys first appear; `opened`: a descriptor."""
    samples: dict[str, dict[str, TarMember]] = {}
    for member in _members(path, opened):
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


def _members(path: str, opened: int | None) -> Iterator[TarMember]:
    """Yield the regular files of an archive, by its headers alone, which are checked for plausibility."""
    with open(path if opened is None else opened, "rb", closefd=opened is None) as file:
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
                    yield TarMember(name, start, length)
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
