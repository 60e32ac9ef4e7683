"""Edits: a function with one small thing changed: a sign, a dimension, a bound of a slice, a line left out."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
"""Operators and what stands for them in an edit."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One small change of one function, as code that can stand in its place."""

    function: FunctionType
    own: CodeType
    "What the function runs, and what it runs with the change."
    code: CodeType
    line: int
    before: str
    after: str
    "What stands in the place of `before`; empty where it is left out."
    size: int
    "Characters of all that the change replaces."

    @contextmanager
    def made(self) -> Iterator[None]:
        """Run the function with the change, for all who call it."""
        setattr(self.function, "__code__", self.code)  # noqa: B010
        try:
            yield
        finally:
            setattr(self.function, "__code__", self.own)  # noqa: B010

    @property
    def rank(self) -> tuple[bool, int]:
        """The order among edits that do the same: first what is left out, then the smaller one."""
        return bool(self.after), self.size

    def __str__(self) -> str:
        return f"`{self.after}` in place of `{self.before}`" if self.after else f"without `{self.before}`"


def function_of(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs: a method of its first argument, or one that its module or its caller names."""
    code = frame.f_code
    name, values = code.co_name, [frame.f_locals.get(name) for name in code.co_varnames[: min(1, code.co_argcount)]]
    kinds = [kind for value in values for kind in (*getattr(value, "__mro__", ()), *type(value).__mro__)]
    named = [vars(kind).get(name) for kind in kinds] + [frame.f_globals.get(name)]
    if frame.f_back is not None:
        named += frame.f_back.f_locals.values()
    for x in (*named, *gc.get_referrers(code)):
        for function in (x, getattr(x, "__func__", None), getattr(x, "fget", None), getattr(x, "__wrapped__", None)):
            if isinstance(function, FunctionType) and function.__code__ is code:
                return function
    return None


def edits_of(function: FunctionType | None, names: bool = False) -> Iterator[Edit]:
    """All small changes of a function that leave it what it closes over; none of one that may loop without end.

    `names`: those that put another name in the place of one, or turn one round, rather than all others.
    """
    if function is None:
        return
    with suppress(OSError, SyntaxError, ValueError):
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        node = tree.body[0]
        if isinstance(node, ast.FunctionDef) and not any(isinstance(x, (ast.While, ast.Yield)) for x in ast.walk(node)):
            node.decorator_list = []
            for change in _changes(node, names):
                with change.made():
                    code = _compiled(node, function)
                if code is not None:
                    line, (before, after) = first + change.line - 1, change.shown()
                    yield Edit(function, function.__code__, code, line, before, after, len(ast.unparse(change.old)))


def _compiled(node: ast.FunctionDef, function: FunctionType) -> CodeType | None:
    """The code of a changed function, which closes over the same variables; None where it cannot stand there."""
    own = function.__code__
    around = ast.parse(f"def around({', '.join(own.co_freevars)}):\n    pass")
    outer = around.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [node]
    ast.fix_missing_locations(around)
    with suppress(SyntaxError, ValueError):
        code: Any = compile(around, own.co_filename, "exec")
        for _ in ("around", "the function"):
            code = next(x for x in code.co_consts if isinstance(x, CodeType))
        if code.co_freevars == own.co_freevars:
            return code.replace(co_firstlineno=own.co_firstlineno, co_qualname=own.co_qualname)
    return None


class NodeChange:
    """A node of a syntax tree, and another one for its place. `part`: what of them to show, where not all."""

    def __init__(self, parent: ast.AST, name: str, place: int | None, old: Any, new: Any, part: Any = None):
        self.old, self._new, self._part = old, new, part or (old, new)
        self._parent, self._name, self._place = parent, name, place
        self.line = getattr(self._part[0], "lineno", getattr(old, "lineno", getattr(parent, "lineno", 1)))

    @contextmanager
    def made(self) -> Iterator[None]:
        self._put(self._new)
        try:
            yield
        finally:
            self._put(self.old)

    def _put(self, node: Any) -> None:
        if self._place is None:
            setattr(self._parent, self._name, node)
        else:
            getattr(self._parent, self._name)[self._place] = node

    def shown(self) -> tuple[str, str]:
        """The code before and after, each on one line."""
        before, after = (_shown(x) for x in self._part)
        return before, after


def _changes(function: ast.FunctionDef, names: bool) -> Iterator[NodeChange]:
    others = functools.partial(_other_names, known=_names(function)) if names else _others
    for parent in ast.walk(function):
        if isinstance(parent, (ast.arguments, ast.FormattedValue, ast.JoinedStr)):
            continue
        for name, value in ast.iter_fields(parent):
            for place, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(item, ast.expr):
                    for other, *part in others(item, parent):
                        yield NodeChange(parent, name, place, item, other, part)
                elif isinstance(item, ast.stmt) and _may_go(item) and not names:
                    yield NodeChange(parent, name, place, item, ast.Pass())


def _names(function: ast.FunctionDef) -> dict[str, list[str]]:
    """The variables of a function, by ""; and the attributes that it reads of each of them."""
    given = [x.arg for x in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    made = [x.id for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    found = {"": list(dict.fromkeys(name for name in (*given, *made) if name not in ("self", "cls")))}
    for x in ast.walk(function):
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id in ("self", *found[""]):
            found.setdefault(x.value.id, []).append(x.attr)
    return found


Other = tuple[ast.expr] | tuple[ast.expr, Any, Any]
"""An expression for the place of another; and what to show of both, where not all."""


def _other_names(x: ast.expr, parent: ast.AST, known: dict[str, list[str]]) -> Iterator[Other]:
    """Other names for a name, its opposite, and another attribute of the same thing."""
    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load) and x.id in known[""]:
        for name in known[""]:
            if name != x.id:
                yield (ast.Name(name, ast.Load()),)
        if not isinstance(parent, (ast.Attribute, ast.Subscript)):
            yield (ast.UnaryOp(ast.Invert(), x),)
            yield (ast.UnaryOp(ast.USub(), x),)
    elif isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and isinstance(x.ctx, ast.Load):
        for name in dict.fromkeys(known.get(x.value.id, [])):
            if name != x.attr:
                yield (ast.Attribute(x.value, name, ast.Load()),)


def _may_go(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, (ast.Assign, ast.AugAssign, ast.If, ast.For))


def _others(x: ast.expr, parent: ast.AST) -> Iterator[Other]:
    """What may stand in the place of an expression."""
    if isinstance(x, ast.Call):
        if isinstance(x.func, ast.Attribute):
            yield (x.func.value,)
        for arg in x.args[:3]:
            if not isinstance(arg, (ast.Starred, ast.Constant)):
                yield (arg,)
        for args, *part in (*_less(x.args), *_exchanged(x.args)):
            yield ast.Call(x.func, args, x.keywords), *part
        for keyword in x.keywords:
            if keyword.arg:
                left = [other for other in x.keywords if other is not keyword]
                yield ast.Call(x.func, x.args, left), keyword, None
    elif isinstance(x, (ast.List, ast.Tuple)) and isinstance(x.ctx, ast.Load):
        for items, *part in _less(x.elts):
            yield type(x)(items, x.ctx), *part
    elif isinstance(x, ast.BinOp):
        if type(x.op) in SWAPPED:
            yield (ast.BinOp(x.left, _swapped(x.op), x.right),)
        yield (x.left,)
        yield (x.right,)
        if isinstance(x.op, (ast.Sub, ast.Div)):
            yield (ast.BinOp(x.right, x.op, x.left),)
    elif isinstance(x, ast.UnaryOp):
        yield (x.operand,)
    elif isinstance(x, ast.Compare) and len(x.ops) == 1 and type(x.ops[0]) in SWAPPED:
        yield (ast.Compare(x.left, [_swapped(x.ops[0])], x.comparators),)
    elif isinstance(x, ast.BoolOp):
        yield (ast.BoolOp(_swapped(x.op), x.values),)
    elif isinstance(x, ast.IfExp):
        yield (x.body,)
        yield (x.orelse,)
    elif isinstance(x, ast.Slice):
        for lower, upper in ((None, x.upper), (x.lower, None), (x.upper, x.lower)):
            if (lower, upper) != (x.lower, x.upper):
                yield (ast.Slice(lower, upper, x.step),)
    elif isinstance(x, ast.Constant) and isinstance(x.value, bool):
        yield (ast.Constant(not x.value),)
    elif isinstance(x, ast.Constant) and isinstance(x.value, int):
        for value in dict.fromkeys((x.value + 1, x.value - 1, -x.value)):
            if value >= 0 and value != x.value:
                yield (ast.Constant(value),)
            elif value < 0 and not isinstance(parent, ast.UnaryOp):
                yield (ast.UnaryOp(ast.USub(), ast.Constant(-value)),)
    elif isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Load):
        yield (x.value,)


def _swapped(operator: ast.AST) -> Any:
    return SWAPPED[type(operator)]()


def _less(items: list[ast.expr]) -> Iterator[tuple[list[ast.expr], Any, Any]]:
    """Each of several items left out."""
    for i, item in enumerate(items if len(items) > 1 else []):
        yield items[:i] + items[i + 1 :], item, None


def _exchanged(items: list[ast.expr]) -> Iterator[tuple[list[ast.expr], Any, Any]]:
    """Each two neighbours exchanged."""
    for i, (a, b) in enumerate(itertools.pairwise(items)):
        yield [*items[:i], b, a, *items[i + 2 :]], [a, b], [b, a]


def _shown(node: Any) -> str:
    if isinstance(node, list):
        return ", ".join(map(_shown, node))
    lines = ast.unparse(ast.fix_missing_locations(node)).splitlines() if node is not None else [""]
    return "" if isinstance(node, ast.Pass) else lines[0] + (" …" if len(lines) > 1 else "")
