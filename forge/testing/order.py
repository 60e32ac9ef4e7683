"""Check of the order: beside the plugins of most runs the position must not matter, unless it is declared.

They are the installed plugins that declare an `example`, options with which each acts in a short fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from forge import registry
from forge.config.build import make_plugin
from forge.contract.plugin import Plugin
from forge.contract.stack import ONE_BY_ONE, SPECS, Stack
from forge.engine.default_actions import Core
from forge.errors import ForgeError, StackError
from forge.testing.subject import Subject
from forge.testing.watch import apart, watched
from forge.twin.compare import Difference
from forge.twin.record import Record


def check_order(subject: Subject) -> None:
    """Fit with the plugin outside and inside all neighbours; if the results differ, find the neighbour."""
    names = list(_possible(subject))
    outside, inside = (_ended(subject, names, where) for where in (True, False))
    if isinstance(outside, Exception) or isinstance(inside, Exception) or _apart(subject, names, outside, inside):
        for name in names:
            _check_pair(subject, name)


def _check_pair(subject: Subject, name: str) -> None:
    outside, inside = (_ended(subject, [name], where) for where in (True, False))
    errors = [ended for ended in (outside, inside) if isinstance(ended, Exception)]
    fix = (
        f"Declare its place: before = ({_label(name)!r},) if it must be called first, after = ({_label(name)!r},) if "
        "last."
    )
    if len(errors) == 2 and all(isinstance(error, ForgeError) for error in errors):
        return  # the two are refused in either order
    assert len(errors) < 2, f"{subject.name!r} does not survive a fit beside {name!r}: {_as_text(errors[0])}"
    place = "outside" if isinstance(outside, Exception) else "inside"
    assert not errors, (
        f"{subject.name!r} depends on its place in the stack: a fit fails only if it is {place} of {name!r}: "
        f"{_as_text(errors[0])}{_shared_hooks(subject, name)} {fix}"
    )
    assert isinstance(outside, Record)
    assert isinstance(inside, Record)
    found = _apart(subject, [name], outside, inside)
    assert found is None, (
        f"{subject.name!r} depends on its place in the stack: {subject.situation.name} ends differently if it is "
        f"inside of {name!r} than outside of it: {found}.{_shared_hooks(subject, name)} {fix}"
    )


def _ended(subject: Subject, names: list[str], outside: bool) -> Record | Exception:
    """Fit with the plugin first or last; return the record, or the error."""
    plugin, others = subject.make(), [_neighbour(name) for name in names]
    try:
        return watched(subject, *([plugin, *others] if outside else [*others, plugin]))
    except Exception as error:
        return error


def _as_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}."


def _apart(subject: Subject, names: list[str], outside: Record, inside: Record) -> Difference | None:
    """Return where two fits part; the plugin's own metrics are not compared: they may depend on its place."""
    return apart(inside, outside, lambda: watched(subject, *map(_neighbour, names)))


def _possible(subject: Subject) -> Iterator[str]:
    """Yield neighbours that a stack may hold beside the plugin."""
    for name in registry.declared("example"):
        plugin, beside = subject.make(), list(subject.beside())
        if name in {other.name for other in (plugin, *beside)}:
            continue
        stack = Stack([plugin, *beside, _neighbour(name)])
        try:
            stack.resolve()
            stack.register(Core(), None)
        except StackError:
            continue
        yield name


def _neighbour(name: str) -> Plugin:
    return make_plugin(name, registry.declared("example")[name])


def _label(name: str) -> str:
    """Return the name for `before` and `after` that includes others of the neighbour's kind."""
    return next(iter(_neighbour(name).provides), name)


def _shared_hooks(subject: Subject, name: str) -> str:
    ours, theirs = subject.make(), _neighbour(name)
    both = [
        hook
        for hook in SPECS
        if hook not in ONE_BY_ONE and hook != "forge_start"
        if getattr(ours, hook, None) is not None and getattr(theirs, hook, None) is not None
    ]
    return f" Both act in {', '.join(both)}." if both else ""
