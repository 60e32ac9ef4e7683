"""Limits of a server: how much one request may hold, how many may wait, and how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """What a server accepts, and for how long a request may take."""

    max_batch: int = 32
    "Rows that are computed at once; also the most rows of one request."
    max_wait: float = 0.002
    "Seconds for which a request waits for others to be computed with it, while the engine is idle."
    max_body: int = 16 * MIB
    "Bytes of a request's body; all bodies that are being read may have 16 times as many together."
    queue: int = 256
    "Requests that are complete and wait for the engine. A body that is being read is none of them."
    max_connections: int = 512
    "Connections that are open at once; processes may often have 1,024 open files."
    timeout: float = 20.0
    "Seconds for the headers of a request, and again from there to its answer."
    max_axes: Mapping[str, int] = field(default_factory=dict)
    "The largest size of dynamic axes by name; for other axes it is the largest one that the data had, if known."
