"""Dispatch: pluggy's resolved implementations of a hook, frozen into one generated function.

pluggy stays the only registry: it holds specs, validates, orders. Calling through it costs microseconds per hook and
call, so after registration every hook becomes one plain function with its implementations written out, or None when
nothing implements it. Frozen and pluggy dispatch give the same results, order and exceptions (a property test says so),
but that an event has no result: pluggy lists what its implementations return, and nobody asks for that.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from pluggy import HookCaller, HookImpl

Function = Callable[..., Any]
Wrapper = Generator[None, Any, Any]
Instrument = Callable[[str, HookImpl], Function]
"""Given a hook's name and an implementation, the function to call in its place: the seam for timing each plugin."""


class Hooks:
    """The callable form of every hook: `trainer.hooks.forge_backward(step, loss)`. Arguments in the spec's order."""

    forge_configure: Function | None
    forge_setup_env: Function
    forge_build_model: Function | None
    forge_build_loader: Function
    forge_build_optimizers: Function
    forge_start: Function | None
    forge_plan_step: Function
    forge_train_step: Function
    forge_micro_step: Function
    forge_backward: Function
    forge_finalize_grads: Function | None
    forge_inspect_grads: Function | None
    forge_edit_grads: Function | None
    forge_optimizer_step: Function
    forge_step_end: Function | None
    forge_prepare_batch: Function
    forge_forward: Function
    forge_evaluate: Function
    forge_log: Function | None
    forge_boundary: Function | None
    forge_save: Function | None
    forge_export: Function
    forge_state_dict: Function | None
    forge_load_state_dict: Function | None
    forge_exception: Function | None
    forge_end: Function | None

    __slots__ = tuple(__annotations__)


def through_pluggy(caller: HookCaller) -> Function | None:
    """Return the hook as called by pluggy itself, so that its tracing sees the call."""
    names = _spec_args(caller)
    if not caller.get_hookimpls():
        return None
    return lambda *args: caller(**dict(zip(names, args, strict=True)))


def freeze(caller: HookCaller, instrument: Instrument | None = None) -> Function | None:
    """Return one function that does what calling `caller` does, without lookups; None if nothing implements it."""
    order = list(reversed(caller.get_hookimpls()))  # pluggy keeps its list last-called first
    if not order:
        return None
    wrappers = [impl for impl in order if impl.wrapper]
    bodies = [impl for impl in order if not impl.wrapper]
    names = _spec_args(caller)
    functions = {impl: instrument(caller.name, impl) if instrument else impl.function for impl in order}
    if not wrappers and len(bodies) == 1 and tuple(bodies[0].argnames) == names:
        return functions[bodies[0]]
    lines = [f"def {caller.name}({', '.join(names)}):"]
    if wrappers:
        lines += _indent(_wrapped(wrappers, _body(bodies, 0, _first_result(caller))))
    else:
        lines += _indent([*_body(bodies, 0, _first_result(caller)), "return result"])
    scope: dict[str, Any] = {"did_not_yield": _did_not_yield, "yielded_twice": _yielded_twice, "unwind": _unwind}
    scope |= {f"body{i}": functions[impl] for i, impl in enumerate(bodies)}
    scope |= {f"wrapper{i}": functions[impl] for i, impl in enumerate(wrappers)}
    return _compile(caller.name, lines, scope)


def _body(bodies: list[HookImpl], at: int, first_result: bool) -> list[str]:
    """Lines that call all plain implementations, and leave the first result of an action in `result`."""
    if not first_result:
        return [*(_call(f"body{i}", impl) for i, impl in enumerate(bodies)), "result = None"]
    if not bodies:
        return ["result = None"]
    lines = [f"result = {_call(f'body{at}', bodies[at])}"]
    if at + 1 < len(bodies):
        lines += ["if result is None:", *_indent(_body(bodies, at + 1, first_result))]
    return lines


def _wrapped(wrappers: list[HookImpl], body: list[str]) -> list[str]:
    """Start every wrapper, run the body, finish the wrappers in reverse: no loop, no nesting, no list of generators."""
    setup: list[str] = []
    for i, impl in enumerate(wrappers):
        setup += [
            f"around{i} = {_call(f'wrapper{i}', impl)}",
            "try:",
            f"    next(around{i})",
            "except StopIteration:",
            f"    did_not_yield(around{i})",
            f"entered = {i + 1}",
        ]
    lines = ["result = None", "error = None", "entered = 0", "try:", *_indent([*setup, *body])]
    lines += ["except BaseException as raised:", "    error = raised"]
    for i in reversed(range(len(wrappers))):
        lines += [
            f"if entered > {i}:",
            "    if error is None:",
            "        try:",
            f"            around{i}.send(result)",
            "        except StopIteration as stop:",
            "            result = stop.value",
            "        except BaseException as raised:",
            "            error = raised",
            "        else:",
            f"            error = yielded_twice(around{i})",
            "    else:",
            f"        result, error = unwind(around{i}, result, error)",
        ]
    return [*lines, "if error is None:", "    return result", "try:", "    raise error", "finally:", "    del error"]


def _did_not_yield(wrapper: Wrapper) -> NoReturn:
    raise RuntimeError(f"hook wrapper {_where(wrapper)} did not yield")


def _yielded_twice(wrapper: Wrapper) -> BaseException:
    """As in pluggy: a wrapper that yields again is closed; if even that raises, this error goes on outwards."""
    try:
        wrapper.close()
    except BaseException as error:
        return error
    raise RuntimeError(f"hook wrapper {_where(wrapper)} has a second yield")


def _unwind(wrapper: Wrapper, result: Any, error: BaseException) -> tuple[Any, BaseException | None]:
    """Throw `error` into a wrapper: it may let it pass, replace it, or turn it into a result."""
    try:
        try:
            wrapper.throw(error)
        except RuntimeError as wrapped:
            # Python turns a StopIteration that leaves a generator into a RuntimeError; the cause is what happened
            if isinstance(error, StopIteration) and wrapped.__cause__ is error:
                wrapper.close()
                return result, error
            raise
    except StopIteration as stop:
        return stop.value, None
    except BaseException as raised:
        return result, raised
    return result, _yielded_twice(wrapper)


def _where(wrapper: Wrapper) -> str:
    code = wrapper.gi_code  # pyright: ignore[reportAttributeAccessIssue]
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _call(function: str, impl: HookImpl) -> str:
    return f"{function}({', '.join(impl.argnames)})"


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _spec_args(caller: HookCaller) -> tuple[str, ...]:
    assert caller.spec is not None
    return tuple(caller.spec.argnames)


def _first_result(caller: HookCaller) -> bool:
    assert caller.spec is not None
    return bool(caller.spec.opts.get("firstresult"))


def _compile(name: str, lines: list[str], scope: dict[str, Any]) -> Function:
    source = "\n".join(lines) + "\n"
    filename = f"<forge dispatch of {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
    exec(compile(source, filename, "exec"), scope)
    return scope[name]
