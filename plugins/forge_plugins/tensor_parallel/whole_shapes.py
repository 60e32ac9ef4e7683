"""Whether a module that failed with divided layers runs where they are whole: on shapes alone, without a message."""

from __future__ import annotations

import inspect
import linecache
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge.env import map_items


class ShapeFailure(NamedTuple):
    """A module whose own code failed, and where."""

    name: str
    module: nn.Module
    place: str
    line: str


def fails_divided(task: nn.Module, divided: Collection[nn.Module], error: BaseException) -> ShapeFailure | None:
    """Return the innermost module with divided layers in which an error arose, if it runs with whole ones.

    Its whole copy and its arguments have shapes and no values; so no rank waits for another.
    """
    names = {id(module): name for name, module in task.named_modules()}
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__) if id(frame.f_locals.get("self")) in names]
    for frame, number in reversed(frames):
        module: nn.Module = frame.f_locals["self"]
        if module not in divided and any(inner in divided for inner in module.modules()):
            path = frame.f_code.co_filename
            name = names[id(module)] or type(task).__name__
            found = ShapeFailure(name, module, f"{path}:{number}", linecache.getline(path, number).strip())
            calls = [f for f, _ in frames if f.f_locals["self"] is module and f.f_code.co_name == "forward"]
            return found if calls and _runs_whole(module, calls[-1].f_locals) else None
    return None


def _runs_whole(module: nn.Module, known: dict[str, Any]) -> bool:
    call = type(module).forward
    given: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(call).parameters.items())[1:]:
        value = _shape(known[name]) if name in known else parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            given += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= value
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = value
        else:
            given.append(value)
    with suppress(Exception), torch.no_grad(), torch.device("meta"):
        call(_whole(module), *given, **named)
        return True
    return False


def _whole(module: nn.Module) -> nn.Module:
    """Return a module of the same kind and shapes, without hooks; a divided parameter knows its whole shape."""
    made = object.__new__(type(module))
    made.__dict__.update({k: OrderedDict() if "_hooks" in k else v for k, v in vars(module).items() if k != "forward"})
    made._parameters = {
        name: p if p is None else nn.Parameter(_shape(p), False) for name, p in module._parameters.items()
    }
    made._buffers = {name: _shape(buffer) for name, buffer in module._buffers.items()}
    made._modules = {name: child if child is None else _whole(child) for name, child in module._modules.items()}
    return made


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    mapped = map_items(value, _shape)
    return value if mapped is None else mapped
