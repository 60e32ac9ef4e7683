"""The parts of a run's tree, with their types: checked before anything uses what a checkpoint says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import NoneType
from typing import Any

from forge.errors import CheckpointError

PARTS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("model", "optimizers", "flags", "progress", "data", "means", "metrics", "plugins"), dict),
    **dict.fromkeys(("fingerprint", "task", "versions"), dict),
    **dict.fromkeys(("left_out", "requests", "stack", "rng"), list),
    **dict.fromkeys(("recipe", "rates_used"), (dict, NoneType)),
    "planned_updates": (int, NoneType),
}
INSIDE = {"task": {"class": str, "options": dict}, "flags": {"frozen": list, "evaluating": list}}
"""What is used of a part by its name."""
MOST = 2**53
"""What a count stays below: beyond it a float cannot hold every whole number."""


def check(tree: Mapping[str, Any], where: str, parts: Collection[str] = PARTS.keys()) -> None:
    """Raise a CheckpointError unless a tree has these parts of a run, of their types, and counters that count."""
    for name in parts:
        if name not in tree:
            raise CheckpointError(f"{where} is no state of a run: it has no {name}. Use another checkpoint.")
        inside = {f"{name}.{key}": (tree[name], key, kind) for key, kind in INSIDE.get(name, {}).items()}
        for path, (holder, key, kind) in {name: (tree, name, PARTS[name]), **inside}.items():
            if not isinstance(holder.get(key), kind):
                found = type(holder.get(key)).__name__
                raise CheckpointError(f"{where}: {path} is a {found}; forge did not write it. Use another checkpoint.")
    for name, value in _counts({name: tree[name] for name in parts}):
        if type(value) is not int or not 0 <= value < MOST:
            big = isinstance(value, int) and abs(value) >= 2**64  # too many digits to show
            shown = "too large" if big else f"{value!r:.60}"
            raise CheckpointError(
                f"{where}: {name} is {shown}; a count is a whole number from 0 to 2^53, so forge did not write it. Use "
                "another checkpoint."
            )


def _counts(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"progress.{name}", value) for name, value in tree.get("progress", {}).items())
    yield from (("left_out", window) for window in tree.get("left_out", ()))
    yield from (
        ("requests.update", asked.get("update", 0)) for asked in tree.get("requests", ()) if isinstance(asked, dict)
    )
    if tree.get("planned_updates") is not None:
        yield "planned_updates", tree["planned_updates"]
