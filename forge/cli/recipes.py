"""`forge recipes`: list recipes, show one with the origin of every value, or copy one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.syntax import Syntax

from forge.config import Recipe, list_recipes, read_recipe
from forge.config.files import locate
from forge.config.guard import omegaconf
from forge.errors import ForgeError
from forge.util import show

EXAMPLES = """\
examples:
  forge recipes                               list installed recipes
  forge recipes quickstart                    show one, merged, with the origin of every value
  forge recipes copy quickstart mine.yaml     then: forge fit mine.yaml
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("recipes", "List recipes, show one, or copy one to start from.", EXAMPLES)
    parser.add_argument("words", metavar="NAME | copy NAME FILE", nargs="*", help="a recipe; or copy one to a file")
    parser.add_argument("--force", action="store_true", help="let copy overwrite FILE")
    return parser


def run(args: Namespace) -> int:
    match args.words:
        case []:
            return _list()
        case ["copy", name, file]:
            return _copy(name, Path(file), args.force)
        case ["copy", *_]:
            raise ForgeError("Write: forge recipes copy NAME FILE")
        case [name]:
            return _show(name)
        case words:
            raise ForgeError(f"forge recipes takes one name, or copy NAME FILE; got {' '.join(words)!r}.")


def _list() -> int:
    grid = show.table("recipe", "description", "package", wrap=["description"])
    for name, file in list_recipes().items():
        grid.add_row(name, file.description, file.package)
    console = show.console()
    console.print(grid)
    console.print("\nforge recipes NAME shows one; forge fit NAME runs it.", style="dim")
    return 0


def _show(name: str) -> int:
    text = annotated(read_recipe(name))
    console = show.console()
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    else:
        print(text, end="")  # unchanged: `forge recipes NAME > mine.yaml` is a recipe
    return 0


def _copy(name: str, file: Path, force: bool) -> int:
    source = locate(name)
    file = file / f"{source.stem}.yaml" if file.is_dir() else file
    if file.suffix not in (".yaml", ".yml"):
        raise ForgeError(f"{str(file)!r} is no name of a recipe file: it must end in .yaml.")
    if file.exists() and not force:
        raise ForgeError(f"{str(file)!r} exists. Choose another name, or overwrite it with --force.")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    has_task = "task" in read_recipe(file).config
    command = f"forge fit {file}" if has_task else f"forge fit FILE.py:Task --recipe {file}"
    show.console().print(f"Wrote {file}. Run it with: {command}", soft_wrap=True)
    return 0


def annotated(recipe: Recipe) -> str:
    """Return the merged recipe as YAML, with the origin of each value in a comment."""
    values = {key: value for key, value in recipe.config.items() if key != "description"}
    described = [(line, "") for line, _ in _lines({"description": recipe.description}, {})]
    lines = [*described, *_lines(values, recipe.origin)] if recipe.description else list(_lines(values, recipe.origin))
    column = max((len(text) for text, origin in lines if origin), default=0) + 2
    return "".join(f"{text:<{column}}# {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def _lines(values: Mapping[str, Any], origin: Mapping[str, str], parent: str = "") -> Iterator[tuple[str, str]]:
    conf = omegaconf()
    indent = "  " * (parent.count(".") + 1 if parent else 0)
    for key, value in values.items():
        name = f"{parent}.{key}" if parent else str(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, origin, name)
        else:
            first, *rest = conf.to_yaml(conf.create({key: value})).splitlines()
            if isinstance(value, str) and "\n" not in value:  # YAML folds long strings: a line break there is a space
                first, rest = " ".join([first, *(line.strip() for line in rest)]), []
            yield f"{indent}{first}", origin.get(name, "")
            yield from ((f"{indent}{line}", "") for line in rest)
