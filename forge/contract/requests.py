"""Requests: what plugins and tasks ask of the Trainer. Order-free, sticky, logged with the asker's name."""

from __future__ import annotations

import logging
import sys
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forge.contract.plugin import Callback, Plugin
from forge.contract.task import TaskModule

if TYPE_CHECKING:
    from forge.engine.trainer import Trainer

logger = logging.getLogger("forge")

KINDS = ("stop", "validation", "checkpoint", "rewind")
"""What is granted at the end of an update."""


@dataclass(frozen=True, slots=True)
class Request:
    """Somebody's wish: "stop", "validation", "checkpoint" or "skip_update"."""

    kind: str
    reason: str
    asker: str
    update: int
    everywhere: bool = False
    "Whether every rank asks for it at this very update, so that it needs no agreement."

    def __str__(self) -> str:
        return f"{self.asker}: {self.reason}" if self.reason else self.asker


class Requests:
    """Everything asked for and not yet granted."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self.open: dict[str, Request] = {}
        "The first request of each kind that has not been granted."
        self.log: deque[Request] = deque(maxlen=1000)
        "The latest requests of the run, in the order asked."

    def add(self, kind: str, reason: str = "", everywhere: bool = False) -> None:
        """Ask; a second request of a kind changes nothing, unless it alone is made by all ranks."""
        request = self.note(kind, reason, everywhere)
        if kind not in self.open or (everywhere and not self.open[kind].everywhere):
            self.open[kind] = request

    def note(self, kind: str, reason: str, everywhere: bool = False, told: bool = False) -> Request:
        """Write a request down with who asked; one that is `told` already is no news."""
        request = Request(kind, reason, self._asker(), self._trainer.progress.update, everywhere)
        self.log.append(request)
        # a checkpoint is a routine, and not worth a line each time
        level = logging.DEBUG if told or kind == "checkpoint" else logging.INFO
        logger.log(level, "%s asked for by %s at update %d", kind, request, request.update)
        return request

    def grant(self, kind: str) -> Request | None:
        """Take a request off the list."""
        return self.open.pop(kind, None)

    def as_data(self) -> list[dict[str, Any]]:
        """What is open here, for the other ranks."""
        return [asdict(request) for request in self.open.values()]

    def agree(self, by_rank: list[list[dict[str, Any]]]) -> None:
        """Take up what any rank asks for; of one kind, the lowest rank's."""
        agreed: dict[str, Request] = {}
        for asked in by_rank:
            for data in asked:
                agreed.setdefault(data["kind"], Request(**{**data, "everywhere": True}))
        self.open = agreed

    def _asker(self) -> str:
        """The plugin, callback or task whose code is asking, found on the call stack."""
        made = [plugin for plugin in self._trainer.stack if isinstance(plugin, Callback)]
        callbacks = {getattr(plugin.function, "__code__", None): plugin.name for plugin in made}
        frame = sys._getframe(2)
        first = ""
        while frame is not None:
            me = frame.f_locals.get("self")
            if isinstance(me, Plugin):
                return me.name
            if isinstance(me, TaskModule):
                return type(me).__name__
            if frame.f_code in callbacks:
                return callbacks[frame.f_code]
            if not first and not frame.f_globals.get("__name__", "").startswith("forge."):
                first = frame.f_code.co_name
            frame = frame.f_back
        return first
