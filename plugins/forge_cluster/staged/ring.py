"""The ring of nodes: each rank sends its files to a rank of the next node, and writes what it is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.checkpoint.hashing import new_hash
from forge.errors import CheckpointError

HEADER = 4096
"""Bytes of the message that names the files to come."""
CHUNK = 32 * 2**20
"""Bytes of one message: what a transfer takes of memory at each end."""

Files = dict[str, tuple[int, str]]
"""Size and hash by name."""


class NodeRing:
    """The neighbours of one rank, given the node of every rank. Made by all ranks together.

    The k-th rank of a node sends to the k-th of the next; where that has fewer, they take turns. Its group of processes
    is used by the thread that writes, and by nothing else.
    """

    def __init__(self, rank: int, nodes: Sequence[str]):
        names = list(dict.fromkeys(nodes))
        members = {name: [other for other, node in enumerate(nodes) if node == name] for name in names}

        def target(of: int) -> int | None:
            if len(names) == 1:
                return None
            following = members[names[(names.index(nodes[of]) + 1) % len(names)]]
            return following[members[nodes[of]].index(of) % len(following)]

        self.target = target(rank)
        self.sources = [other for other in range(len(nodes)) if target(other) == rank]
        self._group: Any = dist.new_group(backend="gloo") if len(names) > 1 else None

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def exchange(self, folder: Path, own: Files) -> None:
        """Send this rank's files of a folder, and write those of its sources there, checked by their hashes.

        Every rank posts one message to its target and one from each source at a time, so that none waits in a circle.
        """
        if self.target is None:
            return
        header = json.dumps(own).encode()
        if len(header) > HEADER:
            raise CheckpointError(f"the names of {len(own)} files take {len(header):,} bytes, more than {HEADER:,}")
        headers = {source: torch.zeros(HEADER, dtype=torch.uint8) for source in self.sources}
        self._post(torch.frombuffer(bytearray(header.ljust(HEADER)), dtype=torch.uint8), headers)
        coming: dict[int, Files] = {s: json.loads(bytes(h.numpy()).rstrip()) for s, h in headers.items()}
        sent = chunks_of(folder, own)
        written = {source: Incoming(folder, files) for source, files in coming.items()}
        while True:
            piece = next(sent, None)
            spaces = {source: space for source, incoming in written.items() if (space := incoming.space()) is not None}
            if piece is None and not spaces:
                return
            self._post(piece, spaces)
            for source in spaces:
                written[source].take(spaces[source])

    def _post(self, piece: Tensor | None, spaces: dict[int, Tensor]) -> None:
        """Send one message and receive others, together."""
        assert self.target is not None
        works = [dist.irecv(space, source, group=self._group) for source, space in spaces.items()]
        if piece is not None:
            works.append(dist.isend(piece, self.target, group=self._group))
        for work in works:
            assert work is not None
            work.wait()


def chunks_of(folder: Path, files: Files) -> Iterator[Tensor]:
    for name, (size, _) in files.items():
        if size:
            whole = torch.from_file(str(folder / name), shared=False, size=size, dtype=torch.uint8)
            yield from whole.split(CHUNK)


class Incoming:
    """The files of another rank, as they arrive."""

    def __init__(self, folder: Path, files: Files):
        self._folder, self._chunks = folder, iter(self._plan(files))
        self._now: tuple[str, int, str] | None = None
        self._hash = new_hash()

    def _plan(self, files: Files) -> Iterator[tuple[str, int, str]]:
        """Name, bytes and, with the last of a file, its hash, for each message."""
        for name, (size, digest) in files.items():
            if Path(name).name != name:
                raise CheckpointError(f"a neighbour names a file {name!r}")
            (self._folder / name).unlink(missing_ok=True)
            for begin in range(0, size, CHUNK):
                yield name, min(CHUNK, size - begin), digest if begin + CHUNK >= size else ""

    def space(self) -> Tensor | None:
        """Return room for the next message; None after the last."""
        self._now = next(self._chunks, None)
        return None if self._now is None else torch.empty(self._now[1], dtype=torch.uint8)

    def take(self, message: Tensor) -> None:
        assert self._now is not None
        name, _, digest = self._now
        data: Any = message.numpy()
        self._hash.update(data)
        with (self._folder / name).open("ab") as file:
            file.write(data)
            if digest:
                file.flush()
                os.fsync(file.fileno())
        if digest:
            if self._hash.hexdigest() != digest:
                raise CheckpointError(f"{name} arrived damaged from a neighbour")
            self._hash = new_hash()
