"""The pictures of a run, read back from its TensorBoard files: the last one of each name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_IMAGES = 12
MOST_BYTES = 2 * 2**20
"""Of all pictures on a page together; a picture that does not fit beside the others is left out."""
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG file, as it was logged."""

    name: str
    update: int
    png: bytes


def pictures(folder: Path) -> list[Picture]:
    """The last picture of every name in a folder of event files; an ImportError where TensorBoard is not installed."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2

    log: Any = event_pb2  # whose classes are made as it is imported
    found: dict[str, Picture] = {}
    for file in sorted(folder.glob("*tfevents*")):
        try:
            for record in _records(file):
                event = log.Event.FromString(record)
                if event.session_log.status == log.SessionLog.START:  # what follows is made again
                    found = {name: picture for name, picture in found.items() if picture.update < event.step}
                found |= {picture.name: picture for picture in _of(event)}
        except (OSError, ValueError, OverflowError, DecodeError):
            continue
    return sorted(found.values(), key=lambda picture: picture.name)


def shown(every: list[Picture]) -> list[Picture]:
    """Those that a page has room for."""
    kept: list[Picture] = []
    room = MOST_BYTES
    for picture in every:
        if len(kept) < MOST_IMAGES and len(picture.png) <= room:
            kept.append(picture)
            room -= len(picture.png)
    return kept


def _of(event: Any) -> Iterator[Picture]:
    for value in event.summary.value:
        if value.HasField("image") and value.image.encoded_image_string.startswith(PNG):
            yield Picture(value.tag, event.step, value.image.encoded_image_string)


def _records(file: Path) -> Iterator[bytes]:
    """The records of an event file, up to where it was cut: each is a length, its checksum, the bytes, their checksum.

    TensorBoard's own reader sums every byte in Python, and imports tensorflow where it is installed.
    """
    if not file.is_file():
        return
    with file.open("rb") as stream:
        while len(head := stream.read(12)) == 12:
            length = int.from_bytes(head[:8], "little")
            if length > 4 * MOST_BYTES:
                stream.seek(length + 4, 1)
                continue
            record = stream.read(length)
            if len(record) < length:
                return
            stream.seek(4, 1)
            yield record
