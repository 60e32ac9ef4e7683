"""manifest.json: what a checkpoint consists of, with a hash over itself, so that it is checked before it is parsed."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from forge.errors import CheckpointError
from forge.state import strict_json

NAME = "manifest.json"
FILES = ("state.json", "model.safetensors", "state.safetensors")
FORMAT = "forge-checkpoint"
VERSION = 1
MAX_SIZE = 64 * 1024

_OUTLINE = strict_json.no_deeper_than(3)
_END = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
_END_SIZE = len(',\n "sha256": ""\n}\n') + 64
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class FileRecord(NamedTuple):
    """One file of a checkpoint."""

    size: int
    sha256: str


def encode(files: dict[str, FileRecord]) -> bytes:
    """The bytes of a manifest; the last line is the hash of all bytes before it."""
    content = {"format": FORMAT, "version": VERSION, "files": {name: files[name]._asdict() for name in FILES}}
    body = json.dumps(content, indent=1).removesuffix("\n}").encode("ascii")
    return body + f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode("ascii")


def decode(data: bytes, what: str) -> dict[str, FileRecord]:
    """Check a manifest against its own hash, then read it. `what` begins every message."""
    body, end = data[:-_END_SIZE], _END.match(data[-_END_SIZE:])
    if end is None or hashlib.sha256(body).hexdigest().encode("ascii") != end[1]:
        raise CheckpointError(f"{what} is damaged: its bytes are not those that were written.")
    content = strict_json.parse(data, what, MAX_SIZE, _OUTLINE, strict_json.unique)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{what} is not the manifest of a forge checkpoint.")
    _check_version(content.get("version"), what)
    records = {name: _record(content.get("files"), name, what) for name in FILES}
    if encode(records) != data:  # there is one way to write a manifest
        raise CheckpointError(f"{what} names other things than {', '.join(FILES)}.")
    return records


def _check_version(version: Any, what: str) -> None:
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{what} has no format version.")
    if version > VERSION:
        raise CheckpointError(
            f"{what} says format version {version}; this forge reads up to {VERSION}. Use the forge that wrote it."
        )


def _record(files: Any, name: str, what: str) -> FileRecord:
    record = files.get(name) if isinstance(files, dict) else None
    if not isinstance(record, dict) or record.keys() != {"size", "sha256"}:
        raise CheckpointError(f"{what} does not describe {name}.")
    size, digest = record["size"], record["sha256"]
    if type(size) is not int or not 0 <= size < 2**62 or type(digest) is not str or not _SHA256.match(digest):
        raise CheckpointError(f"{what} does not describe {name}.")
    return FileRecord(size, digest)
