"""Nested arguments as flat tensors with names, and back: models that are exported take and return plain tensors."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Rebuild = Callable[[Iterator[Tensor]], Any]
"""Makes a value of the same structure with other tensors, taken in order."""


def take_apart(value: Any, name: str) -> tuple[dict[str, Tensor], Rebuild, Any]:
    """Return the tensors in a value by name, how to rebuild it, and its form: what is left without the tensors."""
    if isinstance(value, Tensor):
        return {name: value}, next, "tensor"
    parts = _parts(value)
    if parts is None:
        return {}, lambda tensors: value, repr(value)
    children = {key: take_apart(part, identifier(f"{name}_{key}")) for key, part in parts.items()}
    tensors = {name: tensor for found, _, _ in children.values() for name, tensor in found.items()}

    def rebuild(given: Iterator[Tensor]) -> Any:
        return _made_like(value, {key: make(given) for key, (_, make, _) in children.items()})

    return tensors, rebuild, (type(value).__name__, {key: form for key, (_, _, form) in children.items()})


def take_call_apart(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Callable[[Iterator[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]], Any]:
    """Return the tensors of a call by name, how to rebuild its arguments, and its form."""
    try:
        names = list(inspect.signature(method).bind_partial(*args).arguments.items())
    except (TypeError, ValueError):
        names = []
    positions = [name for name, value in names for _ in range(len(value) if _is_rest(method, name) else 1)]
    positions = positions if len(positions) == len(args) else [f"input_{number}" for number in range(len(args))]
    counted = [name if positions.count(name) == 1 else f"{name}_{at}" for at, name in enumerate(positions)]
    parts = [take_apart(value, name) for name, value in zip(counted, args, strict=True)]
    named = {key: take_apart(value, identifier(key)) for key, value in kwargs.items()}
    tensors = {name: tensor for found, _, _ in [*parts, *named.values()] for name, tensor in found.items()}

    def rebuild(given: Iterator[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(make(given) for _, make, _ in parts), {key: make(given) for key, (_, make, _) in named.items()}

    form = ([form for _, _, form in parts], {key: form for key, (_, _, form) in named.items()})
    return tensors, rebuild, form


def outputs_of(value: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in an output by name, and the names of what is no tensor and cannot be exported."""
    if isinstance(value, Tensor):
        return {"output": value}, []
    parts = _parts(value)
    if parts is None:
        return {}, [] if value is None else [type(value).__name__]
    tensors: dict[str, Tensor] = {}
    left_out: list[str] = []
    for key, part in parts.items():
        name = identifier(str(key)) if isinstance(key, str) else f"output_{key}"
        if isinstance(part, Tensor):
            tensors[name] = part
            continue
        found, left = outputs_of(part)
        tensors |= {f"{name}_{inner.removeprefix('output_')}": tensor for inner, tensor in found.items()}
        left_out += [f"{name} ({what})" if "(" not in what else f"{name}_{what}" for what in left]
    return tensors, left_out


def plain(value: Any) -> Any:
    """Return the tensors of an output in dicts, lists and tuples, which programs can hold; None if it has none."""
    if isinstance(value, Tensor):
        return value
    found = {key: inner for key, part in (_parts(value) or {}).items() if (inner := plain(part)) is not None}
    if not found:
        return None
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(found.values())
    return found


def in_tuples(value: Any) -> Any:
    """Return a plain structure with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: in_tuples(part) for key, part in value.items()}
    return tuple(map(in_tuples, value)) if isinstance(value, (tuple, list)) else value


def flat(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors of an output, in order."""
    return tuple(outputs_of(value)[0].values())


def structure_of(value: Any) -> Any:
    """Return the structure of a plain output for a card: "tensor", or an object or a list of such."""
    if isinstance(value, dict):
        return {str(key): structure_of(part) for key, part in value.items()}
    return [structure_of(part) for part in value] if isinstance(value, (tuple, list)) else "tensor"


def identifier(text: str) -> str:
    """Make a name that every format accepts."""
    return re.sub(r"\W", "_", text)


def _is_rest(method: Callable[..., Any], name: str) -> bool:
    return inspect.signature(method).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds by key; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
    return None


def _made_like(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return parts if type(value) is dict else type(value)(parts)  # pyright: ignore[reportCallIssue]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(**parts)
    if isinstance(value, (tuple, list)):
        return type(value)(parts.values())
    return dataclasses.replace(value, **parts)
