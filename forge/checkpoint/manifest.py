"""manifest.json: the files of a checkpoint, with a hash over itself, so that it is checked before it is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

from forge.checkpoint import strict_json
from forge.checkpoint.hashing import new_hash
from forge.errors import CheckpointError
from forge.version import newer

NAME = "manifest.json"
DOCUMENT = "state.json"
FILES = (DOCUMENT, "model.safetensors", "state.safetensors")
"""The files of a single process."""
FORMAT = "forge-checkpoint"
VERSION = 1
SHARED_VERSION = 2
"""Written by several ranks, each its own files."""
MAX_RANKS = 10_000
MAX_SIZE = 4 * 2**20
"""A manifest takes about 160 bytes per file, two files per rank."""

_MAX_VALUES = 8 * (2 * MAX_RANKS + 4)
_OUTLINE = strict_json.no_deeper_than(3)
_END = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
_END_SIZE = len(',\n "sha256": ""\n}\n') + 64
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class FileRecord(NamedTuple):
    """One file of a checkpoint."""

    size: int
    sha256: str


def files_of(world: int) -> tuple[str, ...]:
    """Return the files of a checkpoint of `world` ranks, without the manifest."""
    if world == 1:
        return FILES
    return (DOCUMENT, *(_name(kind, rank, world) for kind in ("model", "state") for rank in range(world)))


def files_of_rank(rank: int, world: int) -> dict[str, str]:
    """Return the files of one of several ranks, for the model's tensors and for other state."""
    return {kind: _name(kind, rank, world) for kind in ("model", "state")}


def kind_of(name: str) -> str:
    """Return the content of a file of tensors: "model" or "state"."""
    return "model" if name.startswith("model") else "state"


def _name(kind: str, rank: int, world: int) -> str:
    return f"{kind}-{rank + 1:05d}-of-{world:05d}.safetensors"


def encode(files: Mapping[str, FileRecord]) -> bytes:
    """Return the bytes of a manifest; the last line is the hash of all bytes before it."""
    names = files_of(_world(files))
    version = VERSION if names == FILES else SHARED_VERSION
    content = {"format": FORMAT, "version": version, "files": {name: files[name]._asdict() for name in names}}
    body = json.dumps(content, indent=1).removesuffix("\n}").encode("ascii")
    return body + f',\n "sha256": "{new_hash(body).hexdigest()}"\n}}\n'.encode("ascii")


def decode(data: bytes, what: str) -> dict[str, FileRecord]:
    """Check a manifest against its own hash, then parse it. Every message begins with `what`."""
    body, end = data[:-_END_SIZE], _END.match(data[-_END_SIZE:])
    if end is None or new_hash(body).hexdigest().encode("ascii") != end[1]:
        raise CheckpointError(f"{what} is damaged: its content does not match its hash.")
    content = strict_json.parse(data, what, _MAX_VALUES, _OUTLINE, strict_json.unique)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{what} is not the manifest of a forge checkpoint.")
    _check_version(content.get("version"), what)
    files, names = content.get("files"), FILES
    if content["version"] == SHARED_VERSION:
        world = _world(files) if isinstance(files, dict) else 0
        if not 2 <= world <= MAX_RANKS:
            raise CheckpointError(f"{what} does not name the files of 2 to {MAX_RANKS:,} ranks.")
        names = files_of(world)
    records = {name: _record(files, name, what) for name in names}
    if encode(records) != data:  # the encoding is unique
        raise CheckpointError(f"{what} names other files than {', '.join(FILES)}, or those of several ranks.")
    return records


def _world(files: Sized) -> int:
    return len(files) // 2


def _check_version(version: Any, what: str) -> None:
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{what} has no format version.")
    if line := newer(version, SHARED_VERSION, what):
        raise CheckpointError(line)


def _record(files: Any, name: str, what: str) -> FileRecord:
    record = files.get(name) if isinstance(files, dict) else None
    if not isinstance(record, dict) or record.keys() != {"size", "sha256"}:
        raise CheckpointError(f"{what} does not describe {name}.")
    size, digest = record["size"], record["sha256"]
    if type(size) is not int or not 0 <= size < 2**62 or type(digest) is not str or not _SHA256.match(digest):
        raise CheckpointError(f"{what} does not describe {name}.")
    return FileRecord(size, digest)
