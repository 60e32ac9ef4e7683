"""The house: which rooms there are, how large they are, and who imports whom.

    python -m tests.house

A room is a folder of `forge/`, a file at its top, or a package beside it. It imports only rooms of lower levels:
neither a room of its own level nor one above, in types and in functions too. An import of `forge.X` counts as one of
X's room.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PACKAGES = {"forge": REPO / "forge"} | {
    folder.name: folder for folder in sorted((REPO / "plugins").glob("forge_*")) if (folder / "__init__.py").is_file()
}

LEVELS = [
    ["errors", "version"],
    ["registry", "torch_internals"],
    ["rng", "util"],
    ["checkpoint", "env", "options", "progress", "twin"],
    ["data", "metrics", "optim"],
    ["contract"],
    ["config", "snapshot"],
    ["spans"],
    ["runs"],
    ["diagnose", "distributed", "report"],
    ["engine"],
    ["testing", "tuning"],
    ["planning"],
    ["cli"],
    ["__init__", "__main__"],
    ["forge_plugins", "forge_kernels"],
    ["forge_cluster", "forge_doctor", "forge_lightning", "forge_ship", "forge_speed", "forge_sweep"],
]
"""From the ground up: the core, then the packages around it. A package imports the core and `forge_plugins`, and no
other package, except that `forge_speed` imports `forge_kernels`."""

LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
PUBLIC: dict[str, str] = importlib.import_module("forge")._HOME


def room_of(module: str) -> str:
    package, _, rest = module.partition(".")
    return package if package != "forge" else rest.partition(".")[0] or "__init__"


def imports(module: str) -> Iterator[str]:
    """The modules of the house that a module imports, anywhere in it; `forge.X` by its home."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "forge":
            names = [f"forge.{node.attr}"]
        for name in names:
            home = _home(name)
            if home is not None and home not in (module, "forge"):
                yield home


def _home(name: str) -> str | None:
    """The module that a dotted name is, or is defined in; None for a package from elsewhere."""
    package, _, rest = name.partition(".")
    if package not in PACKAGES:
        return None
    public = PUBLIC.get(rest.partition(".")[0]) if package == "forge" else None
    if public is not None:
        return public
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def graph() -> dict[str, set[str]]:
    return {module: set(imports(module)) for module in MODULES}


def beside_or_above(edges: dict[str, set[str]]) -> list[str]:
    """The imports that break the layering."""
    return [
        f"{module} ({room_of(module)}) imports {other} ({room_of(other)})"
        for module, others in edges.items()
        for other in sorted(others)
        if room_of(module) != room_of(other) and LEVEL[room_of(module)] <= LEVEL[room_of(other)]
    ]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Files that import each other, directly or through others: the strongly connected sets of more than one."""
    reached = {module: _reachable(module, edges) for module in edges}
    found: dict[frozenset[str], None] = {}
    for module in edges:
        circle = frozenset({module, *(other for other in reached[module] if module in reached[other])})
        if len(circle) > 1:
            found[circle] = None
    return sorted((sorted(circle) for circle in found), key=len, reverse=True)


def _reachable(module: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [module]
    while todo:
        for other in edges[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def lines(*rooms: str) -> int:
    return sum(len(path.read_text().splitlines()) for module, path in MODULES.items() if room_of(module) in rooms)


def files(*rooms: str) -> list[Path]:
    """The files of rooms, without `__init__.py`."""
    return [path for module, path in MODULES.items() if room_of(module) in rooms and path.name != "__init__.py"]


def all_lines(package: str = "forge") -> int:
    return sum(len(path.read_text().splitlines()) for path in PACKAGES[package].rglob("*.py"))


def main() -> None:
    edges = graph()
    print("rooms, from the top")
    for level in reversed(range(len(LEVELS))):
        there = [room for room in LEVELS[level] if files(room) or lines(room)]
        print("  " + ", ".join(f"{room} ({len(files(room))} files, {lines(room):,} lines)" for room in there))
    print(f"forge/ has {all_lines():,} lines")
    wrong = beside_or_above(edges)
    print(f"imports beside or above: {len(wrong)}")
    for line in wrong:
        print(f"  {line}")
    print("circles of files")
    for circle in circles(edges):
        print(f"  {len(circle)}: {', '.join(circle)}")


if __name__ == "__main__":
    main()
