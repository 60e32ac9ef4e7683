"""Protocols: what forge asks of objects that are no plugins, or of some plugins only.

Those of loaders are made in :mod:`forge.data.protocols`, since data know nothing of runs.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from forge.data.protocols import Indexed, LiveLoader, Seekable, Stateful

__all__ = ["Averages", "Indexed", "LiveLoader", "Seekable", "Stateful"]

Part = TypeVar("Part", bound=nn.Module)


@runtime_checkable
class Averages(Protocol):
    """A plugin that keeps averaged weights, for `task.averaged(part)`."""

    name: str

    def averaged(self, task: Any, part: Part) -> Part:
        """Return a part of the task with its averaged weights; it takes no gradient and has the modes of `part`."""
        ...
