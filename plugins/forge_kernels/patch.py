"""Swapping: kernels in the place of functions and modules, and everything put back.

A function is replaced where it is defined, for as long as a `StandIns` is entered. Several may be entered at once, by
Trainers inside of Trainers or in other threads: the last one counts, and each takes away only its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import nn

from forge.errors import KernelError
from forge_kernels.call_pattern import Pattern, RecordedCall, Unrecordable, fits

Function = Callable[..., Any]
Chosen = tuple[Pattern, Function]
"""How a call must look, and what is called then in the function's place: call(original, *args, **kwargs)."""

# ---------------------------------------------------------------------------------------------------------------------
# Functions


class _Place:
    """Where a function is defined, what belongs there, and who stands there now."""

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
    """By the full name of a function what is called in its place while this is entered."""

    def __init__(self, functions: Mapping[str, Function] | None = None):
        self.functions = dict(functions or {})

    def __enter__(self) -> None:
        if self.functions:
            with _lock:
                places = [(_place(target), function) for target, function in self.functions.items()]
                for place, function in places:  # all of them are there: from here on nothing can fail halfway
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
    """The function itself, whoever stands in its place."""
    with _lock:
        place = _place(target)
        return getattr(place.owner, place.name) if place.original is None or not place.standing else place.original


def locate(target: str) -> tuple[Any, str]:
    """The module or class that holds the thing of this full name, and its name there; AttributeError where none is."""
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
        raise AttributeError(f"there is no {target}")
    return owner, name


def always(target: str, call: Function) -> Function:
    """A stand-in that hands every call to a kernel, which takes what it supports."""
    function = original(target)

    # not functools.wraps: torch.compile would take it for torch's own
    def stand_in(*args: Any, **options: Any) -> Any:
        return call(function, *args, **options)

    return stand_in


def where_chosen(target: str, chosen: Sequence[Chosen]) -> Function:
    """A stand-in that hands over the calls that look like a chosen one, and leaves the others as they are."""
    function, known = original(target), tuple(chosen)

    def stand_in(*args: Any, **options: Any) -> Any:
        for pattern, call in known:
            if fits(pattern, args, options):
                return call(function, *args, **options)
        return function(*args, **options)

    return stand_in


def recording(target: str, note: Callable[[RecordedCall], None]) -> Function:
    """A stand-in that notes every call on its way, and steps aside: torch's functions look themselves up by name when
    a TorchFunctionMode is to hear of them."""
    function, (owner, name) = original(target), locate(target)

    def stand_in(*args: Any, **options: Any) -> Any:
        with suppress(Unrecordable):
            note(RecordedCall.of(target, args, options))
        setattr(owner, name, function)
        try:
            return function(*args, **options)
        finally:
            setattr(owner, name, stand_in)

    return stand_in


def settle_names(soon: bool = False) -> None:
    """Let torch.compile learn which functions are torch's own, before one of them is replaced.

    It makes that table once, by name. Made while a stand-in is there it would take it for torch's function, and never
    look into it. `soon`: torch.compile is going to be used; else it is asked only where it is loaded already.
    """
    if not soon and "torch._dynamo" not in sys.modules:
        return
    try:
        from torch._dynamo.trace_rules import get_torch_obj_rule_map

        get_torch_obj_rule_map()
    except (ImportError, AttributeError):  # a table that is made otherwise cannot be made too late
        return


# ---------------------------------------------------------------------------------------------------------------------
# Modules

Swap = Callable[[nn.Module], nn.Module | None]


class SwappedModules:
    """Modules that stand in their parents for others, with the same parameters under the same names."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Module]] = []

    def put(self, task: nn.Module, found: Iterable[str], swap: Swap, kernel: str) -> list[str]:
        """Swap the modules of these names; those that it fits, by name."""
        done, made = [], {}
        for path in found:
            parent_path, _, name = path.rpartition(".")
            parent = task.get_submodule(parent_path)
            module = getattr(parent, name)
            if id(module) not in made:
                made[id(module)] = module, swapped(module, swap, kernel, path)
            new = made[id(module)][1]
            if new is not None:
                self._places.append((parent, name, module))
                setattr(parent, name, new)
                done.append(path)
        return done

    def put_back(self) -> None:
        """Everything as it was."""
        while self._places:
            parent, name, module = self._places.pop()
            module.train(getattr(parent, name).training)
            setattr(parent, name, module)


def swapped(module: nn.Module, swap: Swap, kernel: str, path: str) -> nn.Module | None:
    """What takes a module's place; None where it does not fit, or has hooks that would be lost."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    new = swap(module)
    if new is None or new is module:
        return None
    if _tensors(new) != _tensors(module):
        raise KernelError(
            f"The kernel {kernel!r} would put a {type(new).__name__} in the place of {path}, but with other parameters "
            "or buffers, or under other names: optimizers and checkpoints would lose them. Leave it out: "
            f"kernels.leave_out={kernel}, and tell its authors."
        )
    return new.train(module.training)


def _tensors(module: nn.Module) -> dict[str, int]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: id(tensor) for name, tensor in named}


def modules_of(task: nn.Module, target: str) -> list[str]:
    """The names of all modules of exactly this class, wherever they stand below the task."""
    try:
        owner, name = locate(target)
    except AttributeError:
        return []
    kind = getattr(owner, name)
    return [path for path, module in task.named_modules(remove_duplicate=False) if path and type(module) is kind]


def refuse_unknown(target: str, kernel: str) -> None:
    """Refuse a kernel that says that it replaces what is not there."""
    try:
        locate(target)
    except (AttributeError, ImportError) as error:
        raise KernelError(
            f"The kernel {kernel!r} says that it replaces {target}, which is not there ({error}). Leave it out: "
            f"kernels.leave_out={kernel}"
        ) from error
