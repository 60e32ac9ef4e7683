"""Protocols: what forge asks of objects that are no plugins, or of some plugins only.

Those of data are in :mod:`forge.data.protocols`, since data know nothing of runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class Averages(Protocol):
    """A plugin that keeps averaged weights, for `task.averaged(part)`."""

    name: str

    def averaged(self, task: Any, part: nn.Module) -> nn.Module:
        """Return a part of the task with its averaged weights; it takes no gradient and has the modes of `part`."""
        ...
