"""Replace functions of torch by kernels, and restore them.

A function is replaced where it is defined, while a `StandIns` is entered. Several may be entered at once, by nested
Trainers or other threads: the last one is active, and leaving one removes only its own functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from forge.errors import KernelError

Function = Callable[..., Any]


class _Place:
    """One patched attribute: its owner, the original function, and the replacements that are entered."""

    def __init__(self, target: str):
        self.owner, self.name = locate(target)
        self.original: Function | None = None
        self.standing: list[Function] = []

    def enter(self, function: Function) -> None:
        if not self.standing:
            self.original = getattr(self.owner, self.name)
        self.standing.append(function)
        setattr(self.owner, self.name, function)

    def leave(self, function: Function) -> None:
        self.standing.remove(function)
        setattr(self.owner, self.name, self.standing[-1] if self.standing else self.original)


_places: dict[str, _Place] = {}
_lock = threading.Lock()


class StandIns:
    """Replacements by the full name of a function, active while this context is entered."""

    def __init__(self, functions: Mapping[str, Function] | None = None):
        self.functions = dict(functions or {})

    def __enter__(self) -> None:
        if self.functions:
            with _lock:
                places = [(_place(target), function) for target, function in self.functions.items()]
                for place, function in places:  # after all lookups, so that an error leaves nothing half replaced
                    place.enter(function)

    def __exit__(self, *error: object) -> None:
        if self.functions:
            with _lock:
                for target, function in self.functions.items():
                    _place(target).leave(function)


def _place(target: str) -> _Place:
    if target not in _places:
        _places[target] = _Place(target)
    return _places[target]


def original(target: str) -> Function:
    """Return the original function, even while it is replaced."""
    with _lock:
        place = _place(target)
        return getattr(place.owner, place.name) if place.original is None or not place.standing else place.original


def locate(target: str) -> tuple[Any, str]:
    """Return the module or class that holds a full name, and the name there; raise AttributeError if missing."""
    path, _, name = target.rpartition(".")
    parts, owner = path.split("."), None
    for length in range(len(parts), 0, -1):
        try:
            owner = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            owner = getattr(owner, part)
        break
    if owner is None or not hasattr(owner, name):
        raise AttributeError(f"{target} does not exist")
    return owner, name


def always(target: str, call: Function) -> Function:
    """Return a replacement that passes every call to a kernel, which falls back for unsupported arguments."""
    function = original(target)

    # no functools.wraps: torch.compile would take this for torch's own function
    def stand_in(*args: Any, **options: Any) -> Any:
        return call(function, *args, **options)

    return stand_in


def watched(target: str, look: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Function:
    """Return a replacement that shows every call to `look` and runs the original, restored meanwhile: under a
    TorchFunctionMode, torch's functions look themselves up by name."""
    function, (owner, name) = original(target), locate(target)

    def stand_in(*args: Any, **options: Any) -> Any:
        setattr(owner, name, function)
        try:
            look(args, options)
            return function(*args, **options)
        finally:
            setattr(owner, name, stand_in)

    return stand_in


def refuse_unknown(target: str, kernel: str) -> None:
    """Raise KernelError if the target that a kernel replaces does not exist."""
    try:
        locate(target)
    except (AttributeError, ImportError) as error:
        raise KernelError(
            f"The kernel {kernel!r} replaces {target}, which cannot be found ({error}). Leave it out: "
            f"kernels.leave_out={kernel}"
        ) from error
