"""Options of a plugin's `Config`, a task's `__init__` or a data function: check, convert and document them.

Values from Python, YAML and the command line are checked here, so an unknown key or a wrong type gives the same error.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge.errors import ForgeError, RecipeError, TaskError, did_you_mean

REQUIRED: Any = inspect.Parameter.empty
WORD = -(2**63), 2**64 - 1
"""The range of an option that is a whole number: what torch takes, signed or not."""
INTERVALS = (".every", ".thaw", ".after", ".start")
"""The suffixes of options that are intervals, given as text."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, type, default (`REQUIRED` if it has none) and one-line description."""

    name: str
    type: Any
    default: Any
    doc: str = ""

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


@functools.cache
def of_config(config: type) -> Sequence[Option]:
    """Return the options of a dataclass; a string under a field is its description."""
    hints, docs = _type_hints(config), field_docs(config)
    return tuple(
        Option(
            *(field.name, hints.get(field.name, Any), _field_default(field), docs.get(field.name, "")),
        )
        for field in dataclasses.fields(config)
        if field.init
    )


def of_callable(function: Callable[..., Any]) -> list[Option]:
    """Return the keyword options of a function or of a class's `__init__`."""
    target = function.__init__ if isinstance(function, type) else function
    hints = _type_hints(target)
    parameters = list(inspect.signature(target).parameters.values())
    if isinstance(function, type):
        parameters = parameters[1:]  # self
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [Option(p.name, hints.get(p.name, Any), p.default) for p in named]


def check(options: Iterable[Option], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` converted to their declared types; raise RecipeError naming `where` and the key."""
    known = {option.name: option for option in options}
    for key in values:
        if key not in known:
            raise RecipeError(f"{where} has no option {key!r}.{did_you_mean(key, known)}")
    for option in known.values():
        if option.required and option.name not in values:
            raise RecipeError(f"{where} needs a value for {option.name!r} ({type_name(option.type)}).")
    return {key: convert(value, known[key].type, f"{where}.{key}") for key, value in values.items()}


def convert(value: Any, kind: Any, where: str) -> Any:
    """Return `value` as `kind`, widening only without loss (int to float, list to tuple); else raise RecipeError."""
    result = _try_convert(value, kind)
    if result is _NO:
        raise RecipeError(
            f"{where} is {value!r} ({type(value).__name__}), but it takes {type_name(kind)}.{_hint(value, kind, where)}"
        )
    return result


def whole(value: Any, name: str, least: int, most: int = 2**63 - 1) -> int:
    """Return a whole number in its range; else raise a ForgeError that names it."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, (bool, str)) and int(value) == value and least <= value <= most:
            return int(value)
    shown = value if not isinstance(value, int) or abs(value) < 2**80 else "a number of many digits"
    end = f"of at least {least:,}" if most == 2**63 - 1 else f"from {least:,} to {most:,}"
    raise ForgeError(f"{name}={shown!r}: it must be a whole number {end}.")


def type_name(kind: Any) -> str:
    """Return `kind` in words: "float", "int or None", "'norm' or 'value'"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(arg) for arg in args))
    if origin is Literal:
        return " or ".join(repr(arg) for arg in args)
    if kind is None or kind is type(None):
        return "None"
    if kind is Any:
        return "any value"
    if args:
        return f"{getattr(origin, '__name__', origin)}[{', '.join(type_name(a) for a in args)}]"
    return "..." if kind is Ellipsis else getattr(kind, "__name__", str(kind))


def field_docs(config: type) -> dict[str, str]:
    """Return the string literal under each field of a dataclass, read from its source; empty without source."""
    docs: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):  # inherited fields are described in the base class
        docs |= _own_field_docs(kind)
    return docs


def _own_field_docs(config: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = getattr(tree.body[0], "body", [])
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


_NO: Any = object()


def _type_hints(thing: Any) -> dict[str, Any]:
    """Return the annotations of a class or function, without those that only a type checker can resolve."""
    thing = inspect.unwrap(thing)
    module = vars(sys.modules.get(thing.__module__, types.ModuleType("")))
    enclosing: Any = sys.modules.get(thing.__module__)
    around: dict[str, Any] = {}
    for part in thing.__qualname__.split(".")[:-1]:  # names of enclosing classes are visible too
        enclosing = getattr(enclosing, part, None)
        around |= vars(enclosing) if isinstance(enclosing, type) else {}
    hints: dict[str, Any] = {}
    for holder in reversed(thing.__mro__) if isinstance(thing, type) else [thing]:
        for name, annotation in vars(holder).get("__annotations__", getattr(holder, "__annotations__", {})).items():
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                hints |= typing.get_type_hints(alone, getattr(holder, "__globals__", module), around)
            except (NameError, AttributeError, TypeError, SyntaxError):
                continue
    return hints


def _field_default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def _try_convert(value: Any, kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is REQUIRED or isinstance(kind, typing.TypeVar):
        return value
    if origin in (typing.Union, types.UnionType):
        exact_first = sorted(args, key=lambda arg: type(value) is not arg)  # over a widening one
        results = (_try_convert(value, arg) for arg in exact_first)
        return next((result for result in results if result is not _NO), _NO)
    if origin is Literal:
        words = [value] if type(value) is not bool else [value, *(("on", "yes") if value else ("off", "no"))]  # as YAML
        return next((arg for arg in args for word in words if type(arg) is type(word) and arg == word), _NO)
    if kind is None or kind is type(None):
        return None if value is None else _NO
    if kind is float:
        is_number = isinstance(value, float) or (_try_convert(value, int) is not _NO)
        return float(value) if is_number else _NO
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) and WORD[0] <= value <= WORD[1] else _NO
    if kind is Path:
        return Path(value) if isinstance(value, (str, Path)) else _NO
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return kind(**check(of_config(kind), value, kind.__qualname__))
    base = origin or kind
    if base in (list, tuple, Sequence) and not isinstance(value, str) and isinstance(value, Sequence):
        return _convert_items(value, base, args)
    if base in (dict, Mapping) and isinstance(value, Mapping):
        if not args:
            return dict(value)
        pairs = {_try_convert(k, args[0]): _try_convert(v, args[1]) for k, v in value.items()}
        return _NO if _NO in pairs or any(v is _NO for v in pairs.values()) else pairs
    return value if isinstance(base, type) and isinstance(value, base) else _NO


def _convert_items(values: Sequence[Any], base: Any, args: tuple[Any, ...]) -> Any:
    if base is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(values):
            return _NO
        items = [_try_convert(value, arg) for value, arg in zip(values, args, strict=True)]
    else:
        items = [_try_convert(value, args[0] if args else Any) for value in values]
    if any(item is _NO for item in items):
        return _NO
    return tuple(items) if base is tuple else items


def _hint(value: Any, kind: Any, where: str) -> str:
    """Return a sentence about a near miss, or ""."""
    choices = [a for a in typing.get_args(kind) if isinstance(a, str)] if typing.get_origin(kind) is Literal else []
    if isinstance(value, str) and choices:
        return did_you_mean(value, choices)
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if isinstance(value, str) and str not in kinds and not {int, float}.isdisjoint(kinds):
        return " Write it without quotes." if value.replace(".", "", 1).isdigit() else ""
    option = where.partition(" (")[0]  # without its source
    if type(value) is int and str in kinds and option.endswith(INTERVALS):
        return " An interval has a unit: '2 updates', '1 epoch'."
    return ""


def bound_arguments(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call to `cls`, defaults included, by name."""
    bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])  # without self
    for parameter in inspect.signature(cls.__init__).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def saved_arguments(
    cls: type, saved: Mapping[str, Any], overrides: Mapping[str, Any], source: Path | str
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments for `cls`, by position and by name: the saved ones, updated by `overrides`."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without self
    named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    values = {**_as_made(cls, saved["options"]), **overrides}
    if len(named) == len(parameters):
        for name in [name for name in values if name not in named]:
            if name in overrides:
                raise TaskError(f"{cls.__name__} takes no argument {name!r}.{did_you_mean(name, named)}")
            raise TaskError(
                f"{source} was saved by a {saved['class']} made with {name}={values[name]!r}, which {cls.__name__} "
                "does not take. Create the task yourself, and use forge.load_weights(task, path)."
            )
    lost = [name for name in saved.get("not_saved", ()) if name not in values]
    required = [p.name for p in named.values() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    lost += [name for name in required if name not in {*values, *lost}]
    if lost:
        given = ", ".join(f"{name}=..." for name in lost)
        raise TaskError(
            f"{source} does not hold {', '.join(lost)} of {cls.__name__}: only plain data are saved. "
            f"Use {cls.__name__}.from_checkpoint(path, {given}), or name a function that makes the task "
            "(--task FILE.py:function on the command line)."
        )
    return _split(parameters, values)


def _split(parameters: list[inspect.Parameter], values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split values by position and by name; before a non-empty `*rest` all go by position."""
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    items = list(values.pop(rest, ())) if rest is not None else []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, *((inspect.Parameter.POSITIONAL_OR_KEYWORD,) if items else ()))
    args = [values.pop(p.name) for p in parameters if p.kind in by_position and p.name in values]
    return [*args, *items], values


def _as_made(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert saved arguments to the declared types: JSON turns every tuple into a list."""
    declared = {option.name: option.type for option in of_callable(cls)}

    def made(name: str, value: Any) -> Any:
        try:
            return convert(value, declared.get(name, Any), name)
        except RecipeError:  # the task was made with this value, despite its declaration
            return value

    return {name: made(name, value) for name, value in options.items()}


def plain(value: Any) -> Any:
    """Return the value if JSON can hold it, else its repr."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else repr(value)[:200]


def flat(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, bool | int | float | str]:
    """Return the options of all groups as `group.option`, without those that are None; what is no number, as text."""
    found = {f"{group}.{key}": plain(value) for group, values in groups.items() for key, value in values.items()}
    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in found.items()
        if value is not None
    }
