"""`forge new`: start a task file or a plugin package from a working template."""

from __future__ import annotations

import keyword
import re
import sys
from argparse import ArgumentParser, Namespace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from forge import registry
from forge.contract.plugin import snake_case
from forge.errors import ForgeError
from forge.util import show

EXAMPLES = """\
examples:
  forge new task my_task        writes my_task.py; then: forge fit my_task.py:MyTask
  forge new plugin weight_norm  writes a repository; then: pip install -e weight_norm && pytest weight_norm
"""
PLUGIN_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "src/$module/__init__.py": "module.py.txt",
    "tests/test_$name.py": "test.py.txt",
    "docs/$name.md": "page.md.txt",
    ".github/workflows/tests.yml": "workflow.yml.txt",
    ".gitignore": "gitignore.txt",
}


def parser() -> ArgumentParser:
    parser = show.new_parser("new", "Start a task or a plugin package from a working template.", EXAMPLES)
    parser.add_argument("kind", choices=["task", "plugin"], help="what to start")
    parser.add_argument("name", metavar="NAME", help="my_task, my-task or MyTask: all mean the same")
    return parser


def run(args: Namespace) -> int:
    names = _names(args.name, args.kind)
    if args.kind == "task":
        path = Path(f"{names['name']}.py")
        _write({path: _filled("task.py.txt", names)})
        command = f"forge fit {path}:{names['cls']}"
    else:
        folder = Path(args.name)
        _refuse_taken_name(names["name"], names["module"])
        _write(
            {
                folder / Template(path).substitute(names): _filled(f"plugin/{source}", names)
                for path, source in PLUGIN_FILES.items()
            }
        )
        command = f"pip install -e {folder} && pytest {folder}"
    show.console().print(f"Next: {command}", soft_wrap=True)
    return 0


def _names(given: str, kind: str) -> dict[str, str]:
    """Return all forms of a name: my_task, MyTask, and for a plugin the package forge-my-task."""
    name = snake_case(given.replace("-", "_"))
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ForgeError(f"{given!r} cannot name a {kind}: use letters, digits and _, with a letter first.")
    if name in ("core", "task", "forge"):
        raise ForgeError(f"{given!r} is taken by forge itself. Choose another name.")
    instead = f"Choose another name: forge new {kind} my_{name}"
    if keyword.iskeyword(name) or keyword.iskeyword(given):
        raise ForgeError(f"{given!r} is a word of Python itself, so it cannot name a {kind}. {instead}")
    if kind == "task" and _is_module(name):
        raise ForgeError(f"{name}.py would hide the module {name!r} from every program in this folder. {instead}")
    cls = given if given.isidentifier() and given[0].isupper() else "".join(part.title() for part in name.split("_"))
    return {"name": name, "cls": cls, "module": f"forge_{name}", "dist": f"forge-{name.replace('_', '-')}"}


def _is_module(name: str) -> bool:
    """Whether Python itself or an installed package has a module of this name."""
    if name in sys.stdlib_module_names:
        return True
    spec = find_spec(name)
    return spec is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(spec.origin or "").parts)


def _refuse_taken_name(name: str, module: str) -> None:
    """Refuse a name that another package has: two plugins or modules of one name conflict once both are installed."""
    there = registry.installed("plugin").get(name)
    what = f"a plugin of {registry.origin(there)}" if there else f"the package {module}" if find_spec(module) else None
    if what is not None:
        raise ForgeError(f"{name!r} is taken by {what}. Choose another name: forge new plugin my_{name}")


def _filled(template: str, names: dict[str, str]) -> str:
    text = files("forge.cli").joinpath("templates", *template.split("/")).read_text(encoding="utf-8")
    return Template(text).substitute(names)


def _write(contents: dict[Path, str]) -> None:
    """Write all files or none; an existing file is never overwritten."""
    for path in contents:
        if path.exists():
            raise ForgeError(f"{path} exists. Choose another name, or move it away.")
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        show.console().print(f"Wrote {path}", soft_wrap=True)
