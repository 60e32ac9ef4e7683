"""Frozen dispatch does what pluggy does: same results of actions, same order, same exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.contract.dispatch import Hooks, freeze, through_pluggy
from forge.contract.stack import SPECS

hookspec, hookimpl = pluggy.HookspecMarker("test"), pluggy.HookimplMarker("test")


class Specs:
    @hookspec(firstresult=True)
    def action(self, a, b): ...

    @hookspec
    def event(self, a, b): ...


class Boom(Exception):
    pass


ERRORS = {"boom": Boom, "stop": StopIteration, "base": KeyboardInterrupt, "runtime": RuntimeError}

PLAIN = ["none", "value", "boom", "stop", "base"]
WRAPPERS = ["pass", "change", "swallow", "boom_before", "boom_after", "stop_after", "replace", "no_yield", "twice"]
ARGUMENTS = [(), ("a",), ("b",), ("a", "b"), ("b", "a")]


def shown(error: BaseException) -> str:
    """The error's text; how pluggy and forge word their complaint about an ill-behaved wrapper may differ."""
    text = str(error)
    for complaint in ("did not yield", "second yield"):
        if complaint in text:
            return complaint
    return text


def of_an_action(result: Any) -> Any:
    """What an event returns is nobody's: pluggy lists it, and forge drops it."""
    return None if isinstance(result, list) else result


def plain(label: str, behaviour: str, log: list[Any]) -> Callable[..., Any]:
    def act(*values: Any) -> Any:
        log.append((label, behaviour, values))
        if behaviour in ERRORS:
            raise ERRORS[behaviour](label)
        return None if behaviour == "none" else (label, values)

    return act


def wrapper(label: str, behaviour: str, log: list[Any]) -> Callable[..., Any]:
    def around(*values: Any) -> Any:
        log.append((label, "before", values))
        if behaviour == "boom_before":
            raise Boom(label)
        if behaviour == "no_yield":
            return "never"
        try:
            result = of_an_action((yield))
            log.append((label, "after", result))
        except GeneratorExit:  # a wrapper yielded twice, so pluggy left the outer ones to the garbage collector
            raise
        except BaseException as error:
            log.append((label, "error", type(error), shown(error)))
            if behaviour == "swallow":
                return f"{label} saved it"
            if behaviour == "replace":
                raise Boom(f"{label} replaced it") from error
            raise
        if behaviour == "twice":
            yield
        if behaviour == "boom_after":
            raise Boom(label)
        if behaviour == "stop_after":
            raise StopIteration(label)
        return (label, result) if behaviour == "change" else result

    return around


def make_plugin(index: int, kind: str, behaviour: str, arguments: tuple[str, ...], hook: str, log: list[Any]) -> Any:
    body = (wrapper if kind == "wrapper" else plain)(f"p{index}", behaviour, log)
    names = ", ".join(arguments)
    start = "return (yield from body({0}))" if kind == "wrapper" else "return body({0})"
    scope: dict[str, Any] = {"body": body}
    exec(f"def {hook}({', '.join(['self', *arguments])}):\n    {start.format(names)}", scope)
    function = scope[hook]
    return type(f"P{index}", (), {hook: hookimpl(wrapper=kind == "wrapper")(function)})()


def outcome(call: Callable[..., Any] | None, log: list[Any]) -> tuple[Any, list[Any]]:
    log.clear()
    try:
        result = ("returned", call("A", "B") if call is not None else None)
    except BaseException as error:
        result = ("raised", type(error), shown(error), type(error.__cause__))
    return result, list(log)


implementations = st.one_of(
    st.tuples(st.just("plain"), st.sampled_from(PLAIN), st.sampled_from(ARGUMENTS)),
    st.tuples(st.just("wrapper"), st.sampled_from(WRAPPERS), st.sampled_from(ARGUMENTS)),
)


@pytest.mark.parametrize("hook", ["action", "event"])
@given(chosen=st.lists(implementations, min_size=1, max_size=7))
def test_frozen_dispatch_equals_pluggy_for_any_set_of_plugins(hook: str, chosen: list[Any]) -> None:
    log: list[Any] = []
    manager = pluggy.PluginManager("test")
    manager.add_hookspecs(Specs)
    for index, (kind, behaviour, arguments) in enumerate(chosen):
        manager.register(make_plugin(index, kind, behaviour, arguments, hook, log))
    caller = getattr(manager.hook, hook)
    (frozen, calls), (pluggys, its_calls) = outcome(freeze(caller), log), outcome(through_pluggy(caller), log)
    assert calls == its_calls
    if hook == "action" or frozen[0] == "raised":
        assert frozen == pluggys
    else:
        assert pluggys[0] == "returned"


def test_an_event_nobody_implements_is_none_and_costs_nothing() -> None:
    manager = pluggy.PluginManager("test")
    manager.add_hookspecs(Specs)
    assert freeze(manager.hook.event) is None
    assert through_pluggy(manager.hook.event) is None


def test_a_lone_default_is_called_directly() -> None:
    class Core:
        @hookimpl
        def action(self, a, b):
            return a + b

    manager, core = pluggy.PluginManager("test"), Core()
    manager.add_hookspecs(Specs)
    manager.register(core)
    assert freeze(manager.hook.action) == core.action


def test_an_implementation_can_be_replaced_by_a_timed_one() -> None:
    log: list[Any] = []
    called: list[str] = []
    manager = pluggy.PluginManager("test")
    manager.add_hookspecs(Specs)
    for index in range(2):
        manager.register(make_plugin(index, "plain", "value", ("a",), "event", log), name=f"plugin{index}")

    def timed(hook: str, impl: pluggy.HookImpl) -> Callable[..., Any]:
        assert hook == "event"
        return lambda *args: called.append(impl.plugin_name)

    call = freeze(manager.hook.event, timed)
    assert call is not None
    call("A", "B")
    assert called == ["plugin1", "plugin0"]


def test_the_hooks_object_has_a_place_for_every_hook() -> None:
    assert set(Hooks.__slots__) == {*SPECS}


def test_a_traceback_through_dispatch_shows_its_source_line() -> None:
    import traceback

    log: list[Any] = []
    manager = pluggy.PluginManager("test")
    manager.add_hookspecs(Specs)
    for index, behaviour in enumerate(["boom", "none"]):
        manager.register(make_plugin(index, "plain", behaviour, ("a",), "event", log))
    call = freeze(manager.hook.event)
    assert call is not None
    with pytest.raises(Boom) as caught:
        call("A", "B")
    assert "body1(a)" in "".join(traceback.format_exception(caught.value))
