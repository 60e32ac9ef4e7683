"""Walk the values inside objects of a user's: attributes, items, classes, and what their code closes over or names.

Each object is seen once, within bounds. Nothing is called and no property is read.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge import registry

MAX_DEPTH = 12
MAX_VALUES = 20_000
MAX_ITEMS = 1_000
"""Items of one container that are looked at."""
MAX_FROZEN = 2**20

GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)

_MODULE_NAMES = frozenset(vars(nn.Module())) | {"trainer", "init_args", "_compiled_call_impl"}
_LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic, type, ModuleType, *GENERATORS)
_CODE = (FunctionType, MethodType, functools.partial)
_MACHINERY = tuple(str.split("forge.contract forge.engine forge.metrics forge.optim forge.testing pluggy torchmetrics"))
"""Packages whose objects are not looked into: what they hold is saved otherwise."""


def walk(
    roots: Mapping[str, Any], enter: Callable[[str, Any], bool] = lambda path, value: True
) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the roots and of everything inside them, in a fixed order, each object once.

    A root is looked into whatever its class, any other value only if `enter` agrees.
    """
    seen: set[int] = set()
    kinds: set[type] = set()
    waiting = deque((name, value, 0) for name, value in roots.items())
    given = 0
    while waiting and given < MAX_VALUES:
        path, value, depth = waiting.popleft()
        is_leaf = value is None or isinstance(value, _LEAVES)
        if not is_leaf or isinstance(value, GENERATORS):
            if id(value) in seen:
                continue
            seen.add(id(value))
        given += 1
        yield path, value
        if not is_leaf and depth < MAX_DEPTH and (depth == 0 or (not _is_closed(value) and enter(path, value))):
            waiting.extend((path + name, child, depth + 1) for name, child in _inside(value))
            waiting.extend((path + name, child, depth + 1) for name, child in _in_classes(type(value), kinds))


def is_atom(value: Any) -> bool:
    """Whether a value has no parts that a walk looks into: its own digest stands for it."""
    if value is None or isinstance(value, _LEAVES):
        return True
    if isinstance(value, (Mapping, list, tuple, deque, threading.local, *_CODE)):
        return False
    has_parts = hasattr(value, "__dict__") or bool(_slots(type(value)))
    return not has_parts or (_is_pythons(type(value)) and frozen(value) is not None)


def frozen(value: Any) -> bytes | None:
    """Return what makes a value of no class of the user's equal to another: its memory, or as it is pickled; else None.

    Of more than a megabyte, the first one.
    """
    with suppress(TypeError, BufferError, ValueError):
        return bytes(memoryview(value).cast("B")[:MAX_FROZEN])
    sink = _Sink()
    pickler = pickle.Pickler(sink, protocol=4)
    pickler.fast = True  # without a memo, which depends on what is shared, not on what is equal
    try:
        with warnings.catch_warnings(action="ignore"):
            pickler.dump(value)
    except _Full:
        pass
    except Exception:
        return None
    return b"".join(sink.parts)


class _Full(Exception):
    pass


class _Sink:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def write(self, piece: bytes) -> int:
        self.parts.append(bytes(piece)[: MAX_FROZEN - self.size])
        self.size += len(piece)
        if self.size > MAX_FROZEN:
            raise _Full
        return len(piece)


def _is_closed(value: Any) -> bool:
    if isinstance(value, (nn.Module, *_CODE)):
        return type(value).__module__.startswith("torchmetrics")
    name = type(value).__module__ + "."
    if name.partition(".")[0] in registry.libraries() - {"forge"}:  # a plugin saves what it has itself
        return True
    return name.startswith(_MACHINERY)


def _is_pythons(kind: type) -> bool:
    """Whether Python made a class: an object of it is a value, like a Decimal, or a means, like a lock."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind is not SimpleNamespace


def is_librarys(value: Any) -> bool:
    """Whether the class of a value belongs to an installed package."""
    return is_of_a_package(type(value))


def is_of_a_package(kind: type) -> bool:
    """Whether a class belongs to an installed package."""
    return _is_installed(kind.__module__)


@functools.lru_cache(maxsize=4096)
def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _is_users(module: str | None) -> bool:
    """Whether a module is neither Python's nor an installed package's."""
    return module is not None and module.partition(".")[0] not in sys.stdlib_module_names and not _is_installed(module)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (end of the path, value) of the values directly inside one."""
    if isinstance(value, Mapping):
        for key, item in itertools.islice(list(value.items()), MAX_ITEMS):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", item
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(itertools.islice(value, MAX_ITEMS)))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, FunctionType):
        yield from _in_function(value)
    elif not is_atom(value):
        yield from _in_object(value)


def _in_function(value: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from ((f".{name}", item) for name, item in vars(value).items() if name != "__wrapped__")
    yield from ((".(default)", item) for item in value.__defaults__ or ())
    yield from ((f".{name}", item) for name, item in (value.__kwdefaults__ or {}).items())
    is_users = _is_users(value.__module__)
    for name in value.__code__.co_names:
        item = value.__globals__.get(name)
        if isinstance(item, GENERATORS) or (is_users and _is_data(item)):
            yield f" (global {value.__module__}.{name})", item


def _in_object(value: Any) -> Iterator[tuple[str, Any]]:
    is_module = isinstance(value, nn.Module)
    for name, item in list(getattr(value, "__dict__", {}).items()):
        if not is_module or name not in _MODULE_NAMES:
            yield f".{name}", item
    if is_module:
        for held in (value._modules, value._buffers, value._parameters):
            yield from ((f".{name}", item) for name, item in held.items() if item is not None)
    for name in _slots(type(value)):
        if hasattr(value, name):
            yield f".{name}", getattr(value, name)


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        name for base in kind.__mro__ for name, item in vars(base).items() if type(item) is MemberDescriptorType
    )


def _in_classes(kind: type, seen: set[type]) -> Iterator[tuple[str, Any]]:
    """Yield what a user's class and its methods hold; of a package's only generators, as MONAI's transforms share one,
    on the class and among the globals of its module."""
    for base in kind.__mro__:
        if base in seen or base.__module__ == "builtins" or f"{base.__module__}.".startswith(("torch.", *_MACHINERY)):
            continue
        seen.add(base)
        is_users = _is_users(base.__module__)
        for name, item in vars(base).items():
            code = getattr(item, "fget", None) or getattr(item, "__func__", item)
            if isinstance(item, GENERATORS) or (is_users and isinstance(code, FunctionType)):
                yield f".{name}", code
            elif is_users and not name.startswith("__") and _is_data(item):
                yield f" (class {base.__qualname__}).{name}", item
        for name, item in list(vars(sys.modules.get(base.__module__, object)).items()):
            if isinstance(item, GENERATORS):
                yield f" (global {base.__module__}.{name})", item


def _is_data(value: Any) -> bool:
    """Whether this is a value, rather than code or machinery."""
    return not isinstance(value, (type, ModuleType, *_CODE)) and not callable(value) and not hasattr(value, "__get__")
