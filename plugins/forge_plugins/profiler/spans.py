"""One event of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Span:
    """One event of the trace."""

    name: str
    kind: str
    start: float
    end: float
    thread: tuple[Any, Any]
    id: int = 0
    "The number of an operator; of a kernel or a wait, that of the operator it belongs to."
    correlation: int = 0
    parent: Span | None = None
    own: float = 0.0
    bytes: int = 0
    total: int = 0
    device: tuple[int, int] = (0, 0)
