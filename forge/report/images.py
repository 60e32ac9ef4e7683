"""Read a run's pictures back from its TensorBoard files: the last one of each name."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.util.files import regular_only

MOST_IMAGES = 12
MOST_BYTES = 2 * 2**20
"""The limit for all pictures of a page together; a picture that does not fit is skipped."""
MOST_RECORDS = 2_000_000
"""Records of a file that are read."""
SMALL = 160
"""A picture of fewer pixels across is enlarged without smoothing."""
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG file as logged."""

    name: str
    update: int
    png: bytes

    @property
    def source(self) -> str:
        return f"data:image/png;base64,{b64encode(self.png).decode()}"

    @property
    def is_small(self) -> bool:
        return int.from_bytes(self.png[16:20], "big") < SMALL


def pictures(folder: Path) -> list[Picture]:
    """Return the last picture of every name in a folder of event files; raise ImportError without TensorBoard."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2

    log: Any = event_pb2  # its classes are generated at import
    found: dict[str, Picture] = {}
    for file in sorted(folder.glob("*tfevents*")):
        try:
            for record in _records(file):
                event = log.Event.FromString(record)
                if event.session_log.status == log.SessionLog.START:  # the updates that follow are repeated
                    found = {name: picture for name, picture in found.items() if picture.update < event.step}
                for value in event.summary.value:
                    if value.HasField("image") and value.image.encoded_image_string.startswith(PNG):
                        found[value.tag] = Picture(value.tag, event.step, value.image.encoded_image_string)
        except (OSError, ValueError, OverflowError, DecodeError):
            continue
    return sorted(found.values(), key=lambda picture: picture.name)


def shown(every: list[Picture]) -> list[Picture]:
    """Return the pictures that fit on a page."""
    kept: list[Picture] = []
    for picture in every:
        if len(kept) < MOST_IMAGES and sum(len(p.png) for p in (*kept, picture)) <= MOST_BYTES:
            kept.append(picture)
    return kept


def _records(file: Path) -> Iterator[bytes]:
    """Yield the records of an event file up to where it was cut: each is a length, its checksum, the bytes, their
    checksum.

    TensorBoard's EventAccumulator sums every byte in Python (63 s for a file of 48 MB, against 3.5 s here) and imports
    tensorflow where it is installed.
    """
    with open(file, "rb", opener=regular_only) as stream:
        for _ in range(MOST_RECORDS):
            head = stream.read(12)
            length = int.from_bytes(head[:8], "little")
            if len(head) < 12 or not length:  # no event is empty: zeros after a crash, or a hole
                return
            if length > 4 * MOST_BYTES:
                stream.seek(length + 4, 1)
                continue
            record = stream.read(length)
            if len(record) < length:
                return
            stream.seek(4, 1)
            yield record
