"""RUN/spans.jsonl: the spans of a run as lines, and as a trace that Perfetto and chrome://tracing open.

The first line is an object that describes the file; every other one is a list with the columns that it names, or an
object {"every": N}: from here on only every N-th update is in the file, which would be larger than `MOST` otherwise.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.util.files import read_regular

if TYPE_CHECKING:
    from forge.spans.record import Total

NAME = "spans{}.jsonl"
MOST = 64 * 2**20
"""The most bytes of a file."""
COLUMNS = ["update", "micro", "hook", "plugin", "begin_us", "us"]


def path_of(folder: Path, rank: int) -> Path:
    return folder / NAME.format(f"-rank{rank}" if rank else "")


class SpanFile:
    """Writes the spans of one rank, update by update."""

    def __init__(self, path: Path, rank: int):
        self._file = path.open("w")
        self._size, self._every, self._room = 0, 1, MOST // 2
        self._open: list[tuple[Total, int, int]] = []
        "Spans of an update that has not ended."
        self._ended = 0
        "When the update before it ended."
        self._zero = time.time_ns() - time.perf_counter_ns()
        self._write({"format": "forge-spans", "version": 1, "rank": rank, "columns": COLUMNS})

    def take(self, ring: deque[tuple[Total | None, int, int]]) -> None:
        """Write the spans of the updates that have ended, and take them from the ring."""
        while ring:
            total, began, ended = ring.popleft()
            if total is not None:
                self._open.append((total, began, ended))
                continue
            if began % self._every == 0:
                self._update(began, ended)
            self._open, self._ended = [], ended
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _update(self, number: int, ended: int) -> None:
        micro = -1
        for total, began, until in sorted(self._open, key=lambda span: span[1]):
            micro += total.hook == "forge_prepare_batch" and total.role == "work" and not total.aside
            self._write([number, max(micro, 0), total.hook, total.plugin, self._us(began), (until - began) / 1e3])
        if self._ended:
            self._write([number, 0, "update", "", self._us(self._ended), (ended - self._ended) / 1e3])
        if self._size > self._room:
            self._every, self._room = 4 * self._every, self._room + (MOST - self._room) // 2
            self._write({"every": self._every})

    def _us(self, ns: int) -> float:
        """Microseconds since 1970, so that the ranks of a run are in one picture."""
        return (ns + self._zero) / 1e3

    def _write(self, line: Any) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        if self._size + len(text) <= MOST:
            self._size += len(text)
            self._file.write(text)


def read(path: Path) -> Iterator[Any]:
    """Yield the lines of a file, which may be torn at its end, and is not trusted."""
    with suppress(OSError, ValueError, RecursionError):
        for line in read_regular(path, MOST).decode(errors="replace").splitlines():
            yield json.loads(line)


def trace(folder: Path) -> dict[str, Any]:
    """Return the spans of all ranks as a trace: a process a rank, updates with what ran inside them."""
    events: list[dict[str, Any]] = []
    for path in sorted(folder.glob(NAME.format("*")), key=lambda path: (len(path.name), path.name)):
        rank = int("0" + "".join(filter(str.isdecimal, path.stem)))
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events += _events(read(path), rank)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(lines: Iterable[Any], rank: int) -> Iterator[dict[str, Any]]:
    for line in lines:
        match line:
            case [int(update), int(micro), str(hook), str(plugin), float(begin), float(us)]:
                name = f"update {update}" if hook == "update" else f"{plugin}.{hook.removeprefix('forge_')}"
                where = {"update": update, "micro-batch": micro}
                yield {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": begin, "dur": us, "args": where}
