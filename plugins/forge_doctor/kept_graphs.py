"""Graphs that outlive their updates: a mark in the graph of one step of each log interval tells, whatever keeps it."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from types import CellType
from typing import Any

from torch import Tensor

from forge_doctor.findings import Finding
from forge_doctor.probes.graph import nodes

KEY = "forge_doctor.mark"
CONTAINERS = (dict, list, tuple, set, deque)
DEPTH = 3
"""Containers inside each other that are looked through for the name of what holds a graph."""


class GraphMark:
    """Lives as long as the graph that it was put into."""

    __slots__ = ("__weakref__",)


class KeptGraphs:
    """The marks of a run. The graph of a step is gone at the next log, unless something keeps it."""

    def __init__(self) -> None:
        self._marks: list[weakref.ref[GraphMark]] = []
        self._is_told = False

    def put(self, loss: Tensor) -> None:
        """Mark the nodes at which a graph begins: whatever is kept of a step, of its loss or before it, has some."""
        mark = GraphMark()
        for node in nodes(loss):
            if not any(hasattr(child, "next_functions") and child.next_functions for child, _ in node.next_functions):
                node.metadata[KEY] = mark
        self._marks = [*self._marks[-1:], weakref.ref(mark)]

    def found(self) -> Iterator[Finding]:
        """What is kept where the graphs of the last two intervals are alive; told once."""
        marks = [mark() for mark in self._marks]
        if self._is_told or len(marks) < 2 or None in marks:
            return
        self._is_told = True
        where = holder(marks[-1])
        by = f" {where} holds one." if where else ""
        text = f"Graphs of steps live on through two log intervals: memory grows with every update.{by}"
        yield Finding("memory_grows", text, where)


def holder(mark: GraphMark | None) -> str:
    """Name what holds a tensor with a marked graph; "" if that has no name."""
    for x in gc.get_objects():
        if issubclass(type(x), Tensor) and x.grad_fn is not None and any(_has(node, mark) for node in nodes(x)):
            name = _name_of(x)
            if name:
                return name
    return ""


def _has(node: Any, mark: GraphMark | None) -> bool:
    return KEY in node.metadata and node.metadata[KEY] is mark


def _name_of(value: Any, depth: int = DEPTH) -> str:
    """Name a value by the attribute, the global or the closure that leads to it."""
    for owner in gc.get_referrers(value):
        kind = type(owner)
        inside = owner if kind is dict else getattr(owner, "__dict__", None)
        key = _key(inside, value) if isinstance(inside, dict) else ""
        if kind is CellType:
            return "a closure"
        if key and kind is dict and "__name__" in owner:
            return f"{owner['__name__']}.{key}"
        if key and kind is dict:
            owner = _object_of(owner)
        if key and type(owner) is not dict:
            return f"{type(owner).__name__}.{key}"
        if depth and kind in CONTAINERS and (name := _name_of(owner, depth - 1)):
            return name
    return ""


def _object_of(inside: dict[str, Any]) -> Any:
    """The object whose attributes these are; a plain dict itself."""
    return next((each for each in gc.get_referrers(inside) if getattr(each, "__dict__", None) is inside), inside)


def _key(inside: dict[str, Any], value: Any) -> str:
    return next((str(key) for key, each in inside.items() if each is value), "")
