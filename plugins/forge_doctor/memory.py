"""Memory that grows with every update: graphs that outlive theirs, and objects that hold more and more.

A mark in the graph of one step of each log interval tells whether graphs live on, whatever keeps them. What the task,
the optimizers and the data hold is looked through at logs, and its sizes are compared.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from forge import registry
from forge.torch_internals import pytree
from forge.util.tracebacks import is_users
from forge.util.walk import is_of_a_package
from forge_doctor.findings import Finding
from forge_doctor.probes.graph import nodes

if TYPE_CHECKING:
    from forge.contract.run import Run

KEY = "forge_doctor.mark"
CONTAINERS = (dict, list, tuple, set, deque)
ATOMS = (type(None), str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size, ModuleType, nn.Parameter)
MOST_VALUES = 20_000
"""Values that are looked through."""
DEPTH = 3
"""Containers inside each other that are looked through for the name of what holds a graph."""
LOOKS, SHARE = 16, 0.003
"""Looks at what is held that are made in any case, and the share of the time since then that others may take."""
MUCH, LITTLE = 2**18, 512
"""Bytes of an update that tell within an epoch, whose end may let go of them, and after one."""
MOST_NODES = 20_000
"""Nodes of a graph that are counted."""
LONG = 16
"""Entries of a container from which they are not looked into."""


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
        if self._is_told or len(self._marks) < 2 or not self._live():
            return
        gc.collect()  # what only a cycle keeps is let go of sooner or later
        if not self._live():
            self._marks.clear()
            return
        self._is_told = True
        where = holder(self._marks[-1]())
        by = f" {where} holds one." if where else ""
        text = f"Graphs of steps live on through two log intervals: memory grows with every update.{by}"
        yield Finding("memory_grows", text, where)

    def _live(self) -> bool:
        return all(mark() is not None for mark in self._marks)


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


@dataclass(slots=True)
class Held:
    """What a container or a tensor holds: entries of so many bytes, functions, modules, nodes of a graph, or bytes."""

    count: int
    each: int = 1
    runs: bool = False
    "Whether the entries are run, trained or gone back through: then each update takes longer as well."
    bounds: frozenset[tuple[str, int]] = frozenset()
    "Numbers above the length of a list that its owner has: one that stays may be its capacity."


@dataclass(slots=True)
class Sizes:
    """The sizes of everything that was held at an update."""

    update: int
    epoch: int
    held: dict[str, Held]


class Growth:
    """What a run's objects hold at its logs. Of something that grows, the rate between two looks counts."""

    def __init__(self) -> None:
        self._looks: deque[Sizes] = deque(maxlen=3)
        self._told: set[str] = set()
        self._count, self._spent, self._began = 0, 0.0, 0.0

    def look(self, trainer: Run) -> None:
        """Note the sizes of what the run holds, if that is not too dear."""
        began = time.perf_counter()
        if self._count == LOOKS:
            self._began = began
        if self._count > LOOKS and self._spent > SHARE * (began - self._began):
            return
        before = self._looks[-1].held if self._looks else {}
        self._looks.append(Sizes(trainer.progress.update, trainer.progress.epoch, held_by(trainer, before)))
        self._count += 1
        self._spent = (self._spent if self._count > LOOKS else 0.0) + time.perf_counter() - began

    def found(self) -> Iterator[Finding]:
        """What has grown at each of the last looks; each told once."""
        if len(self._looks) < 3:
            return
        first, middle, last = self._looks
        for path, now in last.held.items():
            before, start = middle.held.get(path), first.held.get(path, Held(0))
            if before is None or path in self._told or not start.count < before.count < now.count:
                continue
            if before.bounds & now.bounds:
                continue
            added = (now.count - before.count) / (last.update - middle.update)
            size = added * now.each
            if size > (LITTLE if middle.epoch > first.epoch else MUCH) or (now.runs and added >= 0.5):
                self._told.add(path)
                if any(path.startswith(other) for other in self._told - {path}):
                    continue
                what = f"{added:.3g} more entries" if now.each > 1 or now.runs else f"{size:,.0f} bytes more"
                text = (
                    f"{path} holds {what} after every update: {start.count:,} at update {first.update}, "
                    f"{now.count:,} at update {last.update}."
                )
                evidence = {"counts": [start.count, before.count, now.count], "bytes per update": size}
                cure = "Remove it where its update ends." if now.runs else ""
                yield Finding("memory_grows", text, path, evidence, cure)


def held_by(trainer: Run, before: dict[str, Held]) -> dict[str, Held]:
    """Return what the task, its optimizers and the data hold, by path.

    `before` is what was returned last time: what is as long as then is not looked at again.
    """
    found: dict[str, Held] = {}
    roots = {"task": trainer.task, **trainer.given_loaders}
    roots |= {f"optimizer {name or ''}".strip(): entry.optimizer for name, entry in trainer.optimizers.entries.items()}
    seen = set[int]()
    todo: list[tuple[str, Any, Any]] = [(path, value, None) for path, value in roots.items()]
    while todo and len(seen) < MOST_VALUES:
        path, x, owner = todo.pop()
        if isinstance(x, ATOMS) or (isinstance(x, CONTAINERS) and not x) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, (Tensor, np.ndarray, *CONTAINERS)):
            size = _size(x, before.get(path))
            if size is not None:
                if size is not before.get(path):
                    size.bounds = _bounds(x, path.rpartition(".")[2], owner)
                found[path] = size
        if not isinstance(x, CONTAINERS) or len(x) <= LONG:
            for name, value in _inside(x, owner is None):
                todo.append((path + name, value, x))
    return found


def _inside(x: Any, is_root: bool) -> list[tuple[str, Any]]:
    """What is directly inside a value: items, attributes, those of a user's class, what code closes over or names."""
    if isinstance(x, dict):
        return [(f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", value) for key, value in x.items()]
    if isinstance(x, CONTAINERS):
        return [(f"[{i}]", value) for i, value in enumerate(x)]
    if isinstance(x, partial):
        return [("", x.func), ("", x.args), ("", x.keywords)]
    if isinstance(x, MethodType):
        return [("", x.__self__), ("", x.__func__)]
    if isinstance(x, FunctionType):
        if not _is_users(x.__code__.co_filename):
            return []
        cells = [(f".{name}", cell) for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=False)]
        return cells + [(f" ({x.__module__}.{name})", x.__globals__.get(name)) for name in x.__code__.co_names]
    if isinstance(x, CellType):
        return [("", value) for value in gc.get_referents(x)]
    if isinstance(x, type):
        if _is_closed(x) or x.__module__ in sys.stdlib_module_names:
            return []
        return [(f".{name}", getattr(value, "__func__", value)) for name, value in vars(x).items()]
    if isinstance(x, nn.Module):
        held = [(f".{name}", value) for name, value in vars(x).items() if name not in ("trainer", "_parameters")]
        return [*held, (f" ({type(x).__qualname__})", type(x))]
    if not is_root and _is_closed(type(x)):
        return []
    held = [(f".{name}", value) for name, value in getattr(x, "__dict__", {}).items()]
    return [*held, (f" ({type(x).__qualname__})", type(x))]


@lru_cache(maxsize=4096)
def _is_closed(kind: type) -> bool:
    """Whether objects of a class are not looked into: those of a package."""
    return is_of_a_package(kind) or kind.__module__.partition(".")[0] in registry.libraries()


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    return is_users(file)


def _size(value: Any, before: Held | None) -> Held | None:
    """The size of a container by its newest entry, of a tensor with a graph by that, of others by their memory."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return Held(sum(1 for _ in itertools.islice(nodes(value), MOST_NODES)), runs=True)
    if isinstance(value, (Tensor, np.ndarray)):
        return None if isinstance(value, nn.Parameter) else Held(value.nbytes)
    if before is not None and before.count == len(value):
        return before
    if isinstance(value, (dict, list, deque)) and getattr(value, "maxlen", None) is None:
        newest = next(reversed(value.values())) if isinstance(value, dict) else value[-1]
        return Held(len(value), _bytes_of(newest), callable(newest) or _is_group(newest))
    return None


def _is_group(entry: Any) -> bool:
    """Whether this is a group of an optimizer's parameters."""
    return isinstance(entry, dict) and "params" in entry


def _bytes_of(entry: Any) -> int:
    """The memory that an entry keeps: that of the whole tensor of which it is a view."""
    kept, other = dict[int, int](), 0
    for x in pytree.tree_leaves(entry):
        if isinstance(x, Tensor) and x.layout is torch.strided:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, np.ndarray):
            other += x.nbytes if x.base is None else max(x.nbytes, getattr(x.base, "nbytes", 0))
        elif isinstance(x, (str, bytes)):
            other += len(x)
    return sum(kept.values()) + other or 1


def _bounds(value: Any, name: str, owner: Any) -> frozenset[tuple[str, int]]:
    """Numbers of the owner above the length of its list that code of its class reads where it reads this length."""
    own = getattr(owner, "__dict__", {}) if isinstance(value, list) else {}
    larger = {(key, x) for key, x in own.items() if type(x) is int and x > len(value)}
    code = [f.__code__ for f in vars(type(owner)).values() if isinstance(f, FunctionType)] if larger else []
    read = [set(each.co_names) for each in code]
    return frozenset((key, x) for key, x in larger if any({"len", name, key} <= names for names in read))
