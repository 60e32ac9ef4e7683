"""What a module's forward reaches outside the module: running a copy of it could then leave traces."""

from __future__ import annotations

import dis
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from forge.util.walk import GENERATORS, is_librarys

MUTABLE = (list, dict, set, bytearray, deque, itertools.count, *GENERATORS)
SPEAKING = frozenset({"print", "open", "input"})


def reaches_outside(module: nn.Module) -> str:
    """Name what the forward of a module, or of one inside it, reaches or was replaced by; "" if nothing is seen."""
    for path, inner in module.named_modules():
        name = f"{path or type(inner).__name__}.forward"
        if "forward" in vars(inner):
            return f"{name}, which was replaced"
        if not is_librarys(inner):
            found = next(_outside(type(inner).forward, type(inner), set()), "")
            if found:
                return f"{found} in {name}"
    return ""


def step_reaches_outside(task: nn.Module, *names: str) -> str:
    """The same of the steps of a task, with these names, and of its modules: whether its step may run on a copy."""
    for name in names:
        found = next(_outside(getattr(type(task), name, None), type(task), set()), "")
        if found:
            return f"{found} in {name}"
    return reaches_outside(task)


def _outside(function: Any, kind: type, seen: set[Any]) -> Iterator[str]:
    """Yield the names of mutable things outside that a function and those that it names use."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or function in seen or _is_known(function.__module__):
        return
    seen.add(function)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                yield str(step.argval)
        for name in {*code.co_names, *code.co_freevars}:
            if name in SPEAKING:
                yield name
            value = _content(cells[name]) if name in cells else function.__globals__.get(name)
            if isinstance(value, MUTABLE) or _is_a_users_object(value):
                yield name
            yield from _outside(value, kind, seen)
            yield from _outside(getattr(kind, name, None), kind, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return None


def _is_a_users_object(value: Any) -> bool:
    """Whether this is an object of a class that was written outside installed packages."""
    return not isinstance(value, (type, FunctionType, nn.Module)) and not _is_known(type(value).__module__)


def _is_known(module: str | None) -> bool:
    """Whether a module belongs to Python, or to an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    root = (module or "").partition(".")[0]
    return root in sys.stdlib_module_names or root == "forge" or "-packages" in file
