"""The parts of a run's tree, with their types: checked before anything uses what a checkpoint says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from forge import options
from forge.errors import CheckpointError
from forge.progress import Counters

PARTS: dict[str, Any] = {
    "model": dict,
    "optimizers": dict,
    "rates_used": dict[str, float] | None,
    "flags": dict[str, list[str]],
    "progress": dict,
    "planned_updates": int | None,
    "data": dict,
    "means": dict,
    "metrics": dict[str, float],
    "left_out": list[int],
    "requests": list[dict[str, Any]],
    "plugins": dict,
    "stack": list[dict[str, Any]],
    "fingerprint": dict,
    "task": dict,
    "recipe": dict | None,
    "versions": dict,
    "rng": list[dict[str, Any]],
}
MOST = 2**53
"""What a count stays below: beyond it a float cannot hold every whole number."""


def check(tree: Mapping[str, Any], where: str, parts: Collection[str] = PARTS.keys()) -> None:
    """Raise a CheckpointError unless a tree has these parts of a run, of their types, and counters that count."""
    for name in parts:
        if name not in tree:
            raise CheckpointError(f"{where} is no state of a run: it has no {name}. Use another checkpoint.")
        if not options.fits(tree[name], PARTS[name]):
            kind = options.type_name(PARTS[name])
            raise CheckpointError(f"{where}: {name} is no {kind}, so forge did not write it. Use another checkpoint.")
    for name, value in _counts({name: tree[name] for name in parts}):
        if type(value) is not int or not 0 <= value < MOST:
            raise CheckpointError(
                f"{where}: {name} is {shown(value)}; a count is a whole number from 0 to 2^53, so forge did not write "
                "it. Use another checkpoint."
            )


def shown(value: Any) -> str:
    """Return a short text for a value of any kind and size."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a whole number beyond 64 bits"
    return f"{value!r:.60}" if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def _counts(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    progress = tree.get("progress", {})
    for field in fields(Counters):
        if field.name in progress:
            yield f"progress.{field.name}", progress[field.name]
    if tree.get("planned_updates") is not None:
        yield "planned_updates", tree["planned_updates"]
    yield from (("left_out", window) for window in tree.get("left_out", ()))
    yield from (("requests.update", asked["update"]) for asked in tree.get("requests", ()) if "update" in asked)
