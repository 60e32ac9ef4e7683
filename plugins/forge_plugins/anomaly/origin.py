"""Walk from a bad loss or gradient back to its origin: an operation, or a tensor that was bad before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forge_plugins.anomaly.value_watch import BadInput, BadOperation

DELIBERATE = frozenset(
    f"aten.{name}"
    for name in (
        *("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor"),
        *("index_fill", "index_fill_", "constant_pad_nd", "scatter", "scatter_", "lift_fresh_copy"),
    )
)
"""Operations that write a constant: an infinity there is deliberate, as in an attention mask."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin: an operation, or a tensor that was bad before (`source`) and the first operation that used it."""

    event: BadOperation | None
    source: str | None = None
    first_user: BadOperation | None = None
    nan: bool = False

    @property
    def age(self) -> int:
        return self.event.number if self.event is not None else -1

    @property
    def deliberate(self) -> bool:
        """Whether the infinity is deliberate: a fill, a buffer, or a constant without a name."""
        if self.event is not None:
            return self.event.op in DELIBERATE
        return not self.nan and (self.source is None or self.source.startswith("buffer "))


def find(symptoms: Iterable[BadInput]) -> dict[str, Any]:
    """Return the finding: the origin (`kind` and its details), and the first NaN made from it (`then`)."""
    origins = [_walk(cause) for cause in symptoms]
    if not origins:
        return {"kind": "none"}
    first = min(origins, key=lambda origin: origin.age)
    if first.event is not None and first.event.nan:
        infinite = [_walk(cause) for cause in first.event.causes if cause.inf]
        blamed = [origin for origin in infinite if not origin.deliberate]
        if blamed:
            return {**_as_finding(min(blamed, key=lambda origin: origin.age)), "then": _operation(first.event)}
        if infinite:
            return {**_as_finding(first), "given": _as_finding(infinite[0])}
    return _as_finding(first)


def _walk(cause: BadInput) -> Origin:
    """Follow NaN if any, else infinities, always to the oldest input."""
    nan, user = cause.nan, None
    while cause.event is not None:
        event = cause.event
        nan = nan and event.nan
        worse = [c for c in event.causes if (c.nan if nan else c.nan or c.inf)]
        if not worse:
            return Origin(event)
        named = [c for c in worse if c.event is not None or c.source is not None]
        cause = min(named or worse, key=lambda c: c.age)
        user = user if event.moves and user is not None else event
    return Origin(None, cause.source, user, cause.nan)


def _as_finding(origin: Origin) -> dict[str, Any]:
    if origin.event is not None:
        event = origin.event
        found = {**_operation(event), "inputs": event.inputs, "output": event.output}
        return {**found, "bad_rows": event.bad_rows, "length": event.length}
    met = {"met": _operation(origin.first_user)} if origin.first_user is not None else {}
    kind = origin.source.partition(" ")[0] if origin.source else "constant"
    return {"kind": kind, "name": (origin.source or "").partition(" ")[2], **met}


def _operation(event: BadOperation) -> dict[str, Any]:
    module, kind, place = event.context
    return {
        "kind": "backward" if event.node else "forward",
        "op": event.op,
        "node": event.node,
        "micro": event.micro,
        "module": module,
        "class": kind,
        "place": dataclasses.asdict(place) if place is not None else None,
        "made": "NaN" if event.nan else "infinity",
    }
