"""Mutation score: change one place of the core, and see whether a test of its room notices.

    python -m benchmarks.mutants --count 100 --seed 1 --jobs 2 --out build/mutants.json
    python -m benchmarks.mutants --again build/mutants.json          # the places of a former run that are still there

A place is a comparison, an operator, a number, a truth value, a condition, a returned value or a whole statement of
`ROOMS`. They are drawn by lot, with the seed: a room's share is its share of places. Each change is tried in a copy of
the checkout by the quick tests that are nearest: first files of the room's tests that are named like the module, then
the room's others, then those that import the module. A change is caught where one fails, or where they take longer than
five minutes. Tests that fail without a change are left out.

`--again` finds each place by its function, kind and text, and by its file where that is still there, so that a score
before a removal is compared with that of the same places after it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeGuard

REPO = Path(__file__).resolve().parents[1]
ROOMS = ("contract", "engine", "checkpoint", "snapshot", "data", "optim", "metrics")
COMPARISONS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
LEFT_OUT = {".git", ".venv", ".carry", "runs", "build", "dist", "site"}
"""Folders of the checkout that no test needs."""
LIMIT = 300.0
"""Seconds that the tests of one change may take."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: where it is, and the text that stands there instead."""

    file: str
    function: str
    kind: str
    before: str
    after: str
    nth: int
    """Which of the places in that function that are alike."""
    start: int = 0
    end: int = 0
    line: int = 0
    caught: str = ""
    """The test that noticed; empty where none did."""
    seconds: float = 0.0

    @property
    def place(self) -> tuple[str, str, str, str, str, int]:
        return self.file, self.function, self.kind, self.before, self.after, self.nth


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yield every change of a file."""
    text = file.read_text(encoding="utf-8")
    offsets, at = [], 0
    for line in text.encode().split(b"\n"):
        offsets.append(at)
        at += len(line) + 1
    seen: Counter[tuple[str, str, str, str]] = Counter()
    for function, kind, node, changed in changes(ast.parse(text)):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        before, after = text.encode()[start:end].decode(), ast.unparse(changed)
        if isinstance(node, ast.expr):
            after = f"({after})"
        alike = (function, kind, before, after)
        yield Mutant(
            file=str(file.relative_to(REPO)), function=function, kind=kind, before=before, after=after,
            nth=seen[alike], start=start, end=end, line=node.lineno,
        )  # fmt: skip
        seen[alike] += 1


def changes(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr | ast.stmt, ast.AST]]:
    """Yield (function, kind, what stands there, what is to stand there)."""
    for function, node in inside_functions(tree, ""):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
            yield function, "comparison", node, ast.Compare(node.left, ops, node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield function, "operator", node, ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield function, "operator", node, ast.BoolOp(other, node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield function, "operator", node, node.operand
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield function, "constant", node, ast.Constant(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield function, "constant", node, ast.Constant(node.value + 1)
        elif isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
            yield function, "return", node, ast.Return(ast.Constant(None))
        elif isinstance(node, ast.If | ast.IfExp):
            yield function, "condition", node.test, ast.UnaryOp(ast.Not(), node.test)
        elif changes_something(node):
            yield function, "line", node, ast.Pass()


def inside_functions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield what runs in functions, with their names; annotations, f-strings and errors' messages are no behaviour."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert):
                continue
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = f"{function}.{child.name}".strip(".") if named else function  # pyright: ignore[reportAttributeAccessIssue]
            if inner and not named:
                yield inner, child
            yield from inside_functions(child, inner)


def changes_something(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Whether it is a statement that can be left out, and the rest can still run."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def all_mutants() -> list[Mutant]:
    files = (file for room in ROOMS for file in sorted((REPO / "forge" / room).rglob("*.py")))
    return [mutant for file in files for mutant in mutants_of(file)]


def still_there(old: Mutant, everything: Sequence[Mutant]) -> Mutant | None:
    """Return the same change in today's files: in its own file, or else in the only one that has it."""
    alike = [mutant for mutant in everything if mutant.place[1:] == old.place[1:]]
    here = [mutant for mutant in alike if mutant.file == old.file]
    return here[0] if here else alike[0] if len(alike) == 1 and not (REPO / old.file).exists() else None


def nearest_tests(file: str) -> list[list[str]]:
    """Return the test files for a module, in the order in which they are tried."""
    module = Path(file)
    room = REPO / "tests" / "forge" / module.parts[1]
    files = sorted(path for path in room.glob("test_*.py") if not path.stem.endswith("_cuda"))
    named = [path for path in files if module.stem in path.stem]
    dotted = ".".join(module.with_suffix("").parts)
    importing = [
        path
        for path in sorted((REPO / "tests").rglob("test_*.py"))
        if path not in files and not path.stem.endswith("_cuda") and dotted in path.read_text(encoding="utf-8")
    ]
    steps = (named, [path for path in files if path not in named], importing)
    return [[str(path.relative_to(REPO)) for path in step] for step in steps if step]


def left_out(folder: str, names: Sequence[str]) -> set[str]:
    return LEFT_OUT & set(names) if Path(folder) == REPO else {"__pycache__"}


def failing_anyway(files: set[str], copies: SimpleQueue[Path], jobs: int) -> list[str]:
    """Return the tests that fail with no change at all."""

    def one(file: str) -> list[str]:
        copy = copies.get()
        try:
            return failures(copy, [file], LIMIT, [])
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(jobs) as pool:
        return sorted({test for found in pool.map(one, sorted(files)) for test in found})


def try_in(copy: Path, mutant: Mutant, broken: Sequence[str]) -> Mutant:
    """Make the change in a copy of the checkout, run the tests, and take it back."""
    path = copy / mutant.file
    whole = path.read_bytes()
    began = time.monotonic()
    path.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
    try:
        caught = ""
        for tests in nearest_tests(mutant.file):
            but = [word for test in broken for word in ("--deselect", test)]
            found = failures(copy, tests, LIMIT - (time.monotonic() - began), ["-x", *but])
            if found:
                caught = found[0]
                break
    finally:
        path.write_bytes(whole)
    return replace(mutant, caught=caught, seconds=round(time.monotonic() - began, 1))


def failures(copy: Path, tests: Sequence[str], seconds: float, options: Sequence[str]) -> list[str]:
    """Return the tests that fail."""
    words = ["nice", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    paths = [str(copy), str(copy / "plugins"), str(copy / "recipes"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            words,
            check=False,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(seconds, 1),
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return ["out of time"]
    if done.returncode in (0, 5):  # 5: no test was collected
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [line.partition(" ")[2].partition(" - ")[0] for line in lines] or ["ended early"]


def run(mutants: Sequence[Mutant], jobs: int, until: float) -> list[Mutant]:
    """Try each in one of `jobs` copies of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copies.put(copy := Path(folder, str(job)))
            shutil.copytree(REPO, copy, symlinks=True, ignore=left_out)
        broken = failing_anyway(
            {file for mutant in mutants for step in nearest_tests(mutant.file) for file in step}, copies, jobs
        )
        print(f"{len(broken)} tests fail without a change, and count for nothing: {' '.join(broken)}", flush=True)

        def one(mutant: Mutant) -> Mutant | None:
            if time.monotonic() > until:
                return None
            copy = copies.get()
            try:
                tried = try_in(copy, mutant, broken)
            finally:
                copies.put(copy)
            said = "caught" if tried.caught else "MISSED"
            change = f"{tried.before[:50]!r} -> {tried.after[:50]!r}"
            print(f"{said} {tried.seconds:5.0f} s {tried.file}:{tried.line} {tried.kind}: {change}", flush=True)
            return tried

        with ThreadPoolExecutor(jobs) as pool:
            return [tried for tried in pool.map(one, mutants) if tried]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further change after so many")
    parser.add_argument("--out", type=Path, help="write what was tried as JSON")
    parser.add_argument("--again", type=Path, help="try the places of that file which are still there")
    args = parser.parse_args(words)
    everything = all_mutants()
    before: dict[Mutant, Mutant] = {}
    if args.again:
        then = [Mutant(**row) for row in json.loads(args.again.read_text())]
        before = {now: old for old in then if (now := still_there(old, everything))}
        print(f"{len(then) - len(before)} of {len(then)} places are gone.")
        chosen = list(before)
    else:
        chosen = random.Random(args.seed).sample(everything, args.count)
    tried = run(chosen, args.jobs, time.monotonic() + 60 * args.minutes)
    caught = sum(bool(mutant.caught) for mutant in tried)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps([asdict(mutant) for mutant in tried], indent=1) + "\n", encoding="utf-8")
    print(f"{caught} of {len(tried)} changes were caught, of {len(everything)} places.")
    if before:
        was = {now.place: old for now, old in before.items()}
        print(f"Of the same {len(tried)} places, {sum(bool(was[m.place].caught) for m in tried)} were caught then.")
        for mutant in tried:
            if was[mutant.place].caught and not mutant.caught:
                change = f"{mutant.before!r} -> {mutant.after!r}"
                print(f"No longer caught: {mutant.file}:{mutant.line} {change}; then by {was[mutant.place].caught}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
