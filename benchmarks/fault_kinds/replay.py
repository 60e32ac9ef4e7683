"""Rebuild a folder as a crash may leave it, from the recorded sequence of its changes.

What is not flushed may be lost: the data of a file since its last fsync, the names in a folder since its last fsync.
Nothing is assumed of the order in which different files and folders reach the disk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

CREATE, MKDIR, SYMLINK, DATA, TRUNCATE, SYNC, MOVE, REMOVE, SEEN = range(9)
HEAD = struct.Struct("=6Q")


@dataclass(frozen=True, slots=True)
class Change:
    """One call that changed something below the recorded folder, or flushed it."""

    what: int
    inode: int
    place: int
    "The offset of data, or the new size of a truncated file."
    path: PurePosixPath
    other: str
    "The new path of something renamed, or the target of a link."
    data: bytes

    def cut(self, size: int) -> Change:
        """Return a write of only the first bytes."""
        return Change(self.what, self.inode, self.place, self.path, self.other, self.data[:size])


@dataclass(slots=True)
class File:
    """The changes of a file's content, and how many of them are flushed."""

    changes: list[Change] = field(default_factory=list)
    flushed: int = 0


@dataclass(slots=True)
class Link:
    """A symbolic link."""

    target: str


Entry = dict[str, "File | Link | Folder | None"]
"""Names that change at once: a rename within a folder changes two. None removes a name."""


@dataclass(slots=True)
class Folder:
    """The changes of a folder's names, and how many of them are flushed."""

    changes: list[Entry] = field(default_factory=list)
    flushed: int = 0

    def entries(self, count: int | None = None) -> dict[str, File | Link | Folder]:
        """Return the names after the first changes, or after all."""
        found: Entry = {}
        for change in self.changes[:count]:
            found |= change
        return {name: node for name, node in found.items() if node is not None}


Kept = Callable[[int, int], Sequence[int]]
"""(flushed changes, all changes) of a file or a folder -> those that the crash leaves, in order."""


def read_log(log: Path) -> list[Change]:
    """Read the log of benchmarks.fault_kinds.preload."""
    content, at, found = log.read_bytes(), 0, []
    while at < len(content):
        what, inode, place, *sizes = HEAD.unpack_from(content, at)
        at += HEAD.size
        parts = []
        for size in sizes:
            parts.append(content[at : at + size])
            at += size
        found.append(Change(what, inode, place, PurePosixPath(parts[0].decode()), parts[1].decode(), parts[2]))
    return found


class Replay:
    """A simulated folder, empty and flushed at first."""

    def __init__(self, root: Path):
        self.root = PurePosixPath(root)
        self.top = Folder()
        self.nodes: dict[int, File | Folder] = {}

    def apply(self, change: Change) -> None:
        """Make one change. One of a file that was made before the recording is ignored."""
        match change.what:
            case what if what in (CREATE, MKDIR, SYMLINK):
                made = {CREATE: File, MKDIR: Folder, SYMLINK: lambda: Link(change.other)}[what]()
                if not isinstance(made, Link):
                    self.nodes[change.inode] = made
                self._parent(change.path).changes.append({change.path.name: made})
            case what if what in (DATA, TRUNCATE):
                node = self.nodes.get(change.inode)
                if isinstance(node, File):
                    node.changes.append(change)
            case what if what == SYNC:
                node = self.top if change.path == self.root else self.nodes.get(change.inode)
                if node is not None:
                    node.flushed = len(node.changes)
            case what if what == MOVE:
                self._move(change.path, PurePosixPath(change.other))
            case what if what == SEEN:
                self._see(self.nodes.get(change.inode), change.path)
            case _:
                self._parent(change.path).changes.append({change.path.name: None})

    def _see(self, node: File | Folder | None, path: PurePosixPath) -> None:
        """Note the name of an opened file: safetensors renames it without the C library."""
        there = self._parent(path).entries()
        if path.name not in there:
            before = next(name for name, other in there.items() if other is node)
            self._move(path.with_name(before), path)

    def _move(self, before: PurePosixPath, after: PurePosixPath) -> None:
        old, new = self._parent(before), self._parent(after)
        moved = old.entries()[before.name]
        if old is new:
            old.changes.append({before.name: None, after.name: moved})
        else:
            old.changes.append({before.name: None})
            new.changes.append({after.name: moved})

    def _parent(self, path: PurePosixPath) -> Folder:
        found = self.top
        for name in path.relative_to(self.root).parts[:-1]:
            inner = found.entries()[name]
            assert isinstance(inner, Folder)
            found = inner
        return found

    def rebuild(self, into: Path, names: Kept, data: Kept) -> None:
        """Write what the crash leaves into an empty folder."""
        for name, node in _left(self.top, names):
            _write(node, into / name, names, data)


def _left(folder: Folder, names: Kept) -> Iterator[tuple[str, File | Link | Folder]]:
    """Yield the names of a folder; they reach the disk in order, as in every journal."""
    count = len(names(folder.flushed, len(folder.changes)))
    yield from folder.entries(count).items()


def _write(node: File | Link | Folder, path: Path, names: Kept, data: Kept) -> None:
    if isinstance(node, Link):
        path.symlink_to(node.target)
    elif isinstance(node, File):
        path.write_bytes(content_of(node, data))
    else:
        path.mkdir(0o700)
        for name, inner in _left(node, names):
            _write(inner, path / name, names, data)


def content_of(file: File, data: Kept) -> bytes:
    """Return the content of a file; a write that was lost before one that was not leaves zeros."""
    content = bytearray()
    for number in data(file.flushed, len(file.changes)):
        change = file.changes[number]
        end = change.place + len(change.data)
        content.extend(bytes(max(0, end - len(content))))
        if change.what == TRUNCATE:
            del content[change.place :]
        else:
            content[change.place : end] = change.data
    return bytes(content)
