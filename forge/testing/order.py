"""Does it matter where a plugin stands? Beside forge's own it must not, unless it says where it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge import registry
from forge.config.build import make_plugin
from forge.contract.plugin import Plugin
from forge.contract.stack import ONE_BY_ONE, SPECS, Stack
from forge.contract.task import TaskModule
from forge.engine.defaults import Core
from forge.engine.trainer import FitResult
from forge.errors import ForgeError, StackError
from forge.testing.metric_difference import metric_difference
from forge.testing.subject import Subject
from forge.testing.weights import first_difference

NEIGHBOURS: dict[str, dict[str, Any]] = {
    "accumulate": {"window": 2},
    "clip": {"max_norm": 0.1},
    "ema": {"decay": 0.5},
    "guard": {},
    "jsonl": {},
    "schedule": {"warmup": 2},
}
"""Plugins that most runs have, with options by which each acts in a short fit; one not installed is passed over."""

Ended = tuple[TaskModule, FitResult]


def check_order(subject: Subject) -> None:
    """The same fit with the plugin outside of all of them and inside of all; where they differ, find beside whom."""
    names = list(_possible(subject))
    outside, inside = (_ended(subject, names, where) for where in (True, False))
    failed = isinstance(outside, Exception) or isinstance(inside, Exception)
    if failed or _difference(subject, names, outside, inside):
        for name in names:
            _check_pair(subject, name)


def _check_pair(subject: Subject, name: str) -> None:
    outside, inside = (_ended(subject, [name], where) for where in (True, False))
    errors = [ended for ended in (outside, inside) if isinstance(ended, Exception)]
    belongs = (
        f"Say where it belongs: before = ({_label(name)!r},) if it is to be called first, after = ({_label(name)!r},) "
        "if last."
    )
    if len(errors) == 2 and all(isinstance(error, ForgeError) for error in errors):
        return  # the two are refused, whatever the order
    assert len(errors) < 2, f"{subject.name!r} does not survive a fit beside {name!r}: {_told(errors[0])}"
    place = "outside" if isinstance(outside, Exception) else "inside"
    assert not errors, (
        f"{subject.name!r} depends on its place in the stack: a fit fails when it stands {place} of {name!r}, and only "
        f"then: {_told(errors[0])}{_shared(subject, name)} {belongs}"
    )
    difference = _difference(subject, [name], outside, inside)
    assert difference is None, (
        f"{subject.name!r} depends on its place in the stack: {subject.situation.name} ends differently when it stands "
        f"inside of {name!r} than outside of it: {difference}{_shared(subject, name)} {belongs}"
    )


def _ended(subject: Subject, names: list[str], outside: bool) -> Ended | Exception:
    """A fit with the plugin first or last, or the error that it ended with."""
    plugin, others = subject.make(), [_made(name) for name in names]
    try:
        return subject.fit(*([plugin, *others] if outside else [*others, plugin]))
    except Exception as error:
        return error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}."


def _difference(subject: Subject, names: list[str], outside: Any, inside: Any) -> str | None:
    """How two fits differ, in words."""
    (one, result), (other, second) = outside, inside
    difference = first_difference(other, one)
    if difference is not None:
        return difference
    known = _alone(subject, names)  # what the plugin itself records may well depend on where it looks
    return metric_difference(second.metrics, result.metrics, known, lambda: _alone(subject, names))


def _alone(subject: Subject, names: list[str]) -> Mapping[str, Any]:
    return subject.fit(*map(_made, names))[1].metrics


def _possible(subject: Subject) -> Iterator[str]:
    """Neighbours that are installed and that a stack may hold beside the plugin."""
    for name in NEIGHBOURS:
        plugin, beside = subject.make(), list(subject.beside())
        taken = {other.name for other in (plugin, *beside)}
        if name not in registry.installed("plugin") or name in taken:
            continue
        stack = Stack([plugin, *beside, _made(name)])
        try:
            stack.resolve()
            stack.register(Core(), None)
        except StackError:
            continue
        yield name


def _made(name: str) -> Plugin:
    return make_plugin(name, NEIGHBOURS[name])


def _label(name: str) -> str:
    """How to name a neighbour so that others of its kind are meant too."""
    return next(iter(_made(name).provides), name)


def _shared(subject: Subject, name: str) -> str:
    """The hooks in which both act."""
    ours, theirs = subject.make(), _made(name)
    both = [
        hook
        for hook in SPECS
        if hook not in ONE_BY_ONE and hook != "forge_start"
        if getattr(ours, hook, None) is not None and getattr(theirs, hook, None) is not None
    ]
    return f" Both act in {', '.join(both)}." if both else ""
