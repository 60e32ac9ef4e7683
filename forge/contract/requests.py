"""Requests that plugins and tasks make of the Trainer: order-free, sticky, logged with the name of the requester."""

from __future__ import annotations

import logging
import sys
from collections import deque
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.contract.run import Run

logger = logging.getLogger("forge")

SIGNAL = "signal"
"""The name under which a signal requests a stop."""
KINDS = ("stop", "validation", "checkpoint", "rewind")
"""The kinds that are granted at the end of an update."""


@dataclass(frozen=True, slots=True)
class Request:
    """A "stop", "validation", "checkpoint", "rewind" or "skip_update", and who asked for it."""

    kind: str
    reason: str
    asker: str
    update: int
    everywhere: bool = False
    "Whether every rank makes it at this very update, so that no agreement is needed."

    def __str__(self) -> str:
        return f"{self.asker}: {self.reason}" if self.reason else self.asker


class Requests:
    """The requests of a run that have not been granted."""

    def __init__(self, run: Run):
        self._run = run
        self.open: dict[str, Request] = {}
        "The first request of each kind that has not been granted."
        self.log: deque[Request] = deque(maxlen=1000)
        "The latest requests of the run, in the order asked."

    def add(self, kind: str, reason: str = "", everywhere: bool = False, by: str = "") -> None:
        """Make a request. A second of the same kind changes nothing, unless only the second comes from all ranks."""
        request, first = self.note(kind, reason, everywhere, by), self.open.get(kind)
        if first is None or (everywhere and not first.everywhere):
            self.open[kind] = request

    def note(self, kind: str, reason: str, everywhere: bool = False, by: str = "", quiet: bool = False) -> Request:
        """Log a request and who made it, at debug level if `quiet`."""
        asker = by or self._caller(sys._getframe(2))
        request = Request(kind, reason, asker, self._run.progress.update, everywhere)
        self.log.append(request)
        # a checkpoint is a routine, and not worth a line each time
        level = logging.DEBUG if quiet or kind == "checkpoint" else logging.INFO
        logger.log(level, "%s asked for by %s at update %d", kind, request, request.update)
        return request

    def grant(self, kind: str) -> Request | None:
        """Take a request off the list."""
        return self.open.pop(kind, None)

    def as_data(self) -> list[dict[str, Any]]:
        """Return the open requests as plain data, for the other ranks."""
        return [asdict(request) for request in self.open.values()]

    def agree(self, by_rank: list[list[dict[str, Any]]]) -> None:
        """Take over the requests of all ranks; of each kind, the lowest rank's."""
        agreed: dict[str, Request] = {}
        for asked in by_rank:
            for data in asked:
                agreed.setdefault(data["kind"], Request(**{**data, "everywhere": True}))
        self.open = agreed

    def _caller(self, frame: FrameType | None) -> str:
        """Name the code that makes a request: the plugin or the task whose method it is, else the function."""
        while frame is not None and frame.f_globals.get("__name__", "").startswith("forge.contract."):
            frame = frame.f_back
        name = frame.f_code.co_qualname.rpartition("<locals>.")[2] if frame is not None else ""
        owner = name.rpartition(".")[0] or name
        return next((plugin.name for plugin in self._run.stack if type(plugin).__name__ == owner), owner)
