"""RUN/spans.jsonl: every span of a run, a line each, as events of a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.util.files import read_regular

if TYPE_CHECKING:
    from forge.spans.record import Span, Total

NAME = "spans{}.jsonl"
MOST = 64 * 2**20
"""The most bytes of a file."""


class SpanFile:
    """Writes the spans of one rank, update by update; of a run whose file would be larger than `MOST`, fewer and fewer
    updates, which an event in the file says."""

    def __init__(self, folder: Path, rank: int):
        folder.mkdir(parents=True, exist_ok=True)  # on another host it may not be there yet
        self._file = (folder / NAME.format(f"-rank{rank}" if rank else "")).open("w")
        self._rank, self._size, self._every, self._room = rank, 0, 1, MOST // 2
        self._open: list[tuple[Total, int, int]] = []
        "Spans of an update that has not ended."
        self._ended = 0
        "When the update before it ended."
        self._zero = time.time_ns() - time.perf_counter_ns()
        self._write("M", "process_name", args={"name": f"rank {rank}"})

    def take(self, spans: list[Span]) -> None:
        """Write the spans of the updates that have ended, and take all from the list."""
        for total, began, ended in spans:
            if total is not None:
                self._open.append((total, began, ended))
                continue
            if began % self._every == 0:
                self._update(began, ended)
            self._open, self._ended = [], ended
        spans.clear()
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _update(self, number: int, ended: int) -> None:
        micro = -1
        if self._ended:
            self._span(f"update {number}", self._ended, ended, {"update": number})
        for total, began, until in sorted(self._open, key=lambda span: span[1]):
            micro += total.hook == "forge_prepare_batch" and total.role == "work" and not total.aside
            name = f"{total.plugin}.{total.hook.removeprefix('forge_')}"
            self._span(name, began, until, {"update": number, "micro-batch": max(micro, 0)})
        if self._size > self._room:
            self._every, self._room = 4 * self._every, self._room + (MOST - self._room) // 2
            self._write("i", f"from here on every {self._every}th update", ts=self._us(ended), s="p")

    def _span(self, name: str, began: int, ended: int, where: dict[str, int]) -> None:
        self._write("X", name, ts=self._us(began), dur=(ended - began) / 1e3, args=where)

    def _us(self, ns: int) -> float:
        """Microseconds since 1970, so that the ranks of a run are in one picture."""
        return (ns + self._zero) / 1e3

    def _write(self, kind: str, name: str, **more: Any) -> None:
        event = {"ph": kind, "name": name, "pid": self._rank, "tid": 0, **more}
        line = json.dumps(event, separators=(",", ":")) + "\n"
        if self._size + len(line) <= MOST:
            self._size += len(line)
            self._file.write(line)


def trace(folder: Path) -> dict[str, Any]:
    """Return the spans of all ranks as one trace: a process a rank, updates with what ran inside them."""
    files = sorted(folder.glob(NAME.format("*")), key=lambda path: (len(path.name), path.name))
    return {"traceEvents": [event for path in files for event in _events(path)], "displayTimeUnit": "ms"}


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, which may be torn at its end, and is not trusted."""
    with suppress(OSError, ValueError, RecursionError):
        for line in read_regular(path, MOST).decode(errors="replace").splitlines():
            event = json.loads(line)
            if isinstance(event, dict) and "ph" in event:
                yield event
