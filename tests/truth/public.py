"""The names that users can write: `public.txt`, by kind. What each takes is said by the code, and by its --help.

python -m tests.truth.public        # write public.txt, once the changelog says what changes
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import forge
from forge import cli, registry
from forge.config import list_recipes
from forge.contract import hooks

LIST = Path(__file__).with_name("public.txt")
REPO = Path(__file__).resolve().parents[2]
PROJECTS = [REPO / "pyproject.toml", *REPO.glob("plugins/forge_*/pyproject.toml")]
MODULES = ("forge", "forge.data", "forge_kernels", "forge.testing", "forge.tuning")
EXTENDED = ("Trainer", "TaskModule", "Plugin", "Step")
"""The classes that people write for, whose methods and attributes are public too."""


def names() -> dict[str, list[str]]:
    """Return all public names by kind."""
    added = {f"forge.{name}" for name in registry.installed("name")}
    found: dict[str, Iterable[str]] = {}
    for path in MODULES:
        below = {name.rpartition(".")[2] for name in added if name.rpartition(".")[0] == path}
        found[f"names of {path}"] = {*import_module(path).__all__, *below}
    found["arguments of forge.Trainer"] = inspect.signature(forge.Trainer).parameters
    found |= {f"members of forge.{name}": members(getattr(forge, name)) for name in EXTENDED}
    found["hooks"] = [name for name in vars(hooks) if name.startswith("forge_")]
    found["verbs"] = [words for verb in cli.verbs() for words in with_words(verb)]
    found["groups of entry points"] = registry.GROUPS.values()
    for title, kind in {"plugins": "plugin", "tasks": "task", "data sets": "data"}.items():
        found[title] = offered(registry.GROUPS[kind])
    found["recipes"] = [name for name, file in list_recipes().items() if file.path.is_relative_to(REPO)]
    found["fixtures of pytest"] = ("event_trace", "forge_run", "tiny_task")
    found["exit codes"] = map(str, exit_codes())
    found["file formats"] = [f"{name} {version}" for name, version in formats().items()]
    return {kind: sorted(words) for kind, words in found.items()}


def members(kind: type) -> set[str]:
    """Return the documented methods and the annotated attributes of a class and its bases in forge."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("forge."):
            found |= {name for name, value in vars(base).items() if is_documented(value)}
            found |= inspect.get_annotations(base).keys()
    return {name for name in found if not name.startswith("_")}


def is_documented(value: Any) -> bool:
    what = getattr(value, "__func__", value)
    return bool((inspect.isfunction(what) or isinstance(what, property)) and inspect.getdoc(what))


def with_words(verb: str) -> list[str]:
    """Return a verb, and its words where it has some: `ckpt show`."""
    actions = cli.module_of(verb).parser()._actions
    own = [f"{verb} {word}" for each in actions if not each.option_strings for word in each.choices or ()]
    return [verb, *own, *cli.additions(verb)]


def offered(group: str) -> list[str]:
    """Return what the packages of this repository offer, and none of another that happens to be installed."""
    projects = [tomllib.loads(path.read_text())["project"]["name"] for path in PROJECTS]
    return [entry.name for entry in entry_points(group=group) if entry.dist and entry.dist.name in projects]


def exit_codes() -> tuple[int, ...]:
    """Return success, a crash or a negative verdict, a mistake in the input, and a stop by a signal."""
    from forge.errors import Interrupted, NegativeVerdict

    return 0, NegativeVerdict.EXIT_CODE, 2, Interrupted.EXIT_CODE


def formats() -> dict[str, int]:
    """Return the kinds of files that carry a version, each with the newest that is written."""
    from forge.checkpoint import manifest
    from forge.runs import folder, group
    from forge_plugins import conformance
    from forge_ship import card

    made = {each["format"]: each["version"] for each in (folder.FORMAT, group.FORMAT, conformance.FORMAT)}
    return {**made, manifest.FORMAT: manifest.SHARED_VERSION, "forge-export": card.VERSION}


def text(found: dict[str, list[str]]) -> str:
    """Return the list as it is kept: a heading for each kind, a name a line."""
    return "\n".join("\n".join([f"# {kind}", *words, ""]) for kind, words in found.items())


if __name__ == "__main__":
    LIST.write_text(text(names()), encoding="utf-8")
