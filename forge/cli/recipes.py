"""`forge recipes`: list recipes, or show one with the origin of every value."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from rich.syntax import Syntax

from forge.config import Recipe, list_recipes, read_recipe
from forge.config.guard import omegaconf
from forge.util import show

EXAMPLES = """\
examples:
  forge recipes                               list installed recipes
  forge recipes quickstart                    show one, merged, with the origin of every value
  forge recipes quickstart > mine.yaml        a recipe of your own; then: forge fit mine.yaml
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("recipes", "List recipes, or show one to start from.", EXAMPLES)
    parser.add_argument("name", metavar="NAME", nargs="?", help="a recipe to show")
    return parser


def run(args: Namespace) -> int:
    return _show(args.name) if args.name else _list()


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
