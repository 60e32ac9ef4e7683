"""Replace functions and modules by kernels, and restore them.

A function is replaced where it is defined, while a `StandIns` is entered. Several may be entered at once, by nested
Trainers or other threads: the last one is active, and leaving one removes only its own functions.
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
"""A pattern, and the replacement for calls that match it: call(original, *args, **kwargs)."""

# ---------------------------------------------------------------------------------------------------------------------
# Functions


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


def where_chosen(target: str, chosen: Sequence[Chosen]) -> Function:
    """Return a replacement that passes calls matching a chosen pattern to its kernel, and others to the original."""
    function, known = original(target), tuple(chosen)

    def stand_in(*args: Any, **options: Any) -> Any:
        for pattern, call in known:
            if fits(pattern, args, options):
                return call(function, *args, **options)
        return function(*args, **options)

    return stand_in


def recording(target: str, note: Callable[[RecordedCall], None]) -> Function:
    """Return a replacement that records every call and runs the original, restored meanwhile: under a
    TorchFunctionMode, torch's functions look themselves up by name."""
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


def build_dynamo_table(soon: bool = False) -> None:
    """Let torch.compile build its table of torch's own functions before one of them is replaced.

    The table is built once, by name. Built while a replacement is active it would list the replacement as torch's
    function, which is never traced. `soon`: torch.compile will be used; otherwise only if torch._dynamo is loaded.
    """
    if not soon and "torch._dynamo" not in sys.modules:
        return
    try:
        from torch._dynamo.trace_rules import get_torch_obj_rule_map

        get_torch_obj_rule_map()
    except (ImportError, AttributeError):  # another version of torch, without this table
        return


# ---------------------------------------------------------------------------------------------------------------------
# Modules

Swap = Callable[[nn.Module], nn.Module | None]


class SwappedModules:
    """Replaced modules, with the same parameters under the same names."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Module]] = []

    def replace(self, task: nn.Module, found: Iterable[str], swap: Swap, kernel: str) -> list[str]:
        """Replace the named modules where `swap` supports them; return the names of those replaced."""
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

    def restore(self) -> None:
        """Restore all modules."""
        while self._places:
            parent, name, module = self._places.pop()
            module.train(getattr(parent, name).training)
            setattr(parent, name, module)


def swapped(module: nn.Module, swap: Swap, kernel: str, path: str) -> nn.Module | None:
    """Return the replacement of a module; None if it is not supported or has hooks, which would be lost."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    new = swap(module)
    if new is None or new is module:
        return None
    if _tensors(new) != _tensors(module):
        raise KernelError(
            f"The kernel {kernel!r} would replace {path} by a {type(new).__name__} with other parameters or buffers, "
            "or other names: optimizers and checkpoints would lose them. Leave it out: "
            f"kernels.leave_out={kernel}, and report it to its authors."
        )
    return new.train(module.training)


def _tensors(module: nn.Module) -> dict[str, int]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: id(tensor) for name, tensor in named}


def modules_of(task: nn.Module, target: str) -> list[str]:
    """Return the names of all modules below the task that are exactly of this class."""
    try:
        owner, name = locate(target)
    except AttributeError:
        return []
    kind = getattr(owner, name)
    return [path for path, module in task.named_modules(remove_duplicate=False) if path and type(module) is kind]


def refuse_unknown(target: str, kernel: str) -> None:
    """Raise KernelError if the target that a kernel replaces does not exist."""
    try:
        locate(target)
    except (AttributeError, ImportError) as error:
        raise KernelError(
            f"The kernel {kernel!r} replaces {target}, which cannot be found ({error}). Leave it out: "
            f"kernels.leave_out={kernel}"
        ) from error
