"""The limits of time in the tests, and why none of them fails on a slow machine.

    python -m tests.limits      # writes the table of tests/README.md

A test waits `PATIENCE` (tests/support/patience.py) for what must come. Every other limit, and every sleep outside of a
loop that waits, has a comment `# limit: ` with the reason on its line: they make the table, and test_limits.py finds
what has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
README = TESTS / "README.md"
BEGIN = "<!-- made by python -m tests.limits -->\n"
REASON = re.compile(r"# limit: (.+)")
NAMES = {"timeout", "data_timeout", "deadline"}
"""Of arguments that are limits of time."""
WAITS = {"wait", "join", "alarm", "setitimer"}
"""Functions whose last argument is one."""
CLOCKS = {"monotonic", "perf_counter", "process_time"}


def unexplained() -> list[str]:
    """Return the places of limits and sleeps without a reason."""
    return [place for _, _, place, reason in limits() if not reason]


def table() -> str:
    """Return the reasons as rows, each with the files that give it."""
    by_reason: dict[str, list[str]] = {}
    for path, _, _, reason in limits():
        files = by_reason.setdefault(reason, [])
        if path not in files:
            files.append(path)
    rows = [f"| {reason} | {', '.join(f'`{path}`' for path in files)} |" for reason, files in sorted(by_reason.items())]
    return "\n".join(["| why a slow machine does not fail it | where |", "|---|---|", *rows, ""])


def limits() -> Iterator[tuple[str, int, str, str]]:
    """Yield (file, line, place, reason) of every limit that is no PATIENCE."""
    for path in sorted(TESTS.rglob("*.py")):
        if path.stem in ("limits", "test_limits"):
            continue
        text = path.read_text()
        lines, name = text.splitlines(), str(path.relative_to(TESTS))
        explained = {number for number, line in enumerate(lines, 1) if REASON.search(line)}
        for number in sorted({*found(ast.parse(text)), *explained}):
            reason = REASON.search(lines[number - 1])
            place = f"{name}:{number}: {lines[number - 1].strip()}"
            yield name, number, place, reason[1].strip() if reason else ""


def found(tree: ast.AST, in_loop: bool = False) -> Iterator[int]:
    """Yield the lines of numbers that limit a time, and of sleeps outside of loops."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from (word.value.lineno for word in node.keywords if word.arg in NAMES and is_number(word.value))
            if called in WAITS and node.args and is_number(node.args[-1]):
                yield node.args[-1].lineno
            if called == "sleep" and not in_loop and not is_zero(node):
                yield node.lineno
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and is_clock(node.left):
            yield from [node.lineno] * is_number(node.right)
        if isinstance(node, ast.Compare) and any(is_clock(each) for each in ast.walk(node)):
            yield from (node.lineno for each in node.comparators if is_number(each))
        if isinstance(node, ast.arguments):
            given = [*node.args[len(node.args) - len(node.defaults) :], *node.kwonlyargs]
            for argument, default in zip(given, [*node.defaults, *node.kw_defaults], strict=True):
                if argument.arg in NAMES and default is not None and is_number(default):
                    yield default.lineno
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from found(node, isinstance(node, ast.While) or (in_loop and not is_function))


def is_number(node: ast.AST) -> bool:
    """Whether a number is written there, alone or in arithmetic; 0 is no limit but "at once"."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) or (
            is_number(node.right) and isinstance(node.left, ast.Name | ast.Call | ast.BinOp)
        )
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("max", "min"):
        return any(map(is_number, node.args))
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and bool(node.value)


def is_zero(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and not call.args[0].value


def is_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def main() -> None:
    before = README.read_text().partition(BEGIN)[0]
    README.write_text(f"{before}{BEGIN}\n{table()}")


if __name__ == "__main__":
    main()
