"""Recipe files: find them, read them with their bases, and record the line of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge import registry
from forge.config.guard import DEEPEST, RecipeText, read_text, refuse_more
from forge.errors import RecipeError, did_you_mean
from forge.util.files import check_name

TOP_LEVEL = ("description", "extends", "task", "data", "trainer", "plugins")
SECTIONS = {"task": "{name: ...}", "data": "{name: ...}", "trainer": "{max_epochs: 10}", "plugins": "{name: {}}"}
"""The sections of a recipe, each with an example."""
Where = Callable[[str], str]
"""Maps a full key to its origin."""


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """An installed recipe: its file, its description, and the package that ships it."""

    path: Path
    description: str
    package: str


def list_recipes() -> dict[str, RecipeFile]:
    """Return every installed recipe by name, without importing the packages that ship them."""
    return {name: RecipeFile(path, _description(path), package) for name, (path, package) in _installed().items()}


@dataclass(slots=True)
class SourceFile:
    """A recipe file: its unresolved values, and the line of each key."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    def where(self, key: str) -> str:
        """Return the file and line of a key; one that YAML reads otherwise than it is written has its parent's line."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path.name}:{self.lines[key]}" if key else self.path.name


def locate(name: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a recipe given by name or path; a path inside a recipe is relative to that recipe."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        path = beside.parent / path if beside else path
        check_name(path)
        if not path.is_file():
            raise RecipeError(f"No recipe file {str(path)!r}.{did_you_mean(path.stem, _installed())}")
        return path
    known = _installed()
    if str(name) not in known:
        what = f"{beside.name} extends {str(name)!r}, which is not installed." if beside else ""
        what = what or f"No recipe is called {str(name)!r}."
        raise RecipeError(f"{what}{did_you_mean(str(name), known)}")
    return known[str(name)][0]


def with_bases(path: Path) -> list[SourceFile]:
    """Return a recipe after all its bases, each once, so that a shared base cannot undo what another base changed."""
    done: dict[Path, SourceFile] = {}
    counts: Counter[str] = Counter()

    def visit(path: Path, chain: list[Path]) -> None:
        path = path.resolve()
        if path in chain:
            names = [file.stem for file in [*chain[chain.index(path) :], path]]
            raise RecipeError(f"Recipes extend each other in a circle: {' -> '.join(names)}. Break it in one of them.")
        if path in done:
            return
        if len(chain) > DEEPEST:
            raise RecipeError(
                f"{chain[0].name} extends {path.name} over more than {DEEPEST} recipes. Merge some of them."
            )
        text = read_text(path)
        counts.update(text.counts)
        refuse_more(counts, f"{path.name}:1")
        file = source_of(path, text)
        bases = file.values.pop("extends", None) or []
        for base in [bases] if isinstance(bases, str) else bases:
            visit(locate(base, beside=path), [*chain, path])
        done[path] = file

    visit(path, [])
    *bases, own = done.values()
    for base in bases:
        base.values.pop("description", None)  # descriptions are not inherited
    return [*bases, own]


def read(path: Path) -> SourceFile:
    """Read one file, unresolved, and check its shape."""
    return source_of(path, read_text(path))


def source_of(path: Path, text: RecipeText) -> SourceFile:
    """Return a file of this text, its shape checked."""
    if not isinstance(text.values, dict | None):
        raise RecipeError(f"{path.name}:1 is no recipe: write a mapping with keys among {', '.join(TOP_LEVEL)}.")
    file = SourceFile(path, text.values or {}, text.lines)
    settle_optional(file.values, file.lines)
    check_shape(file.values, file.where)
    return file


def settle_optional(values: dict[str, Any], lines: dict[str, int]) -> None:
    """Take in the plugins that a recipe writes as `NAME?` where they are installed; write null for the others."""
    plugins = values.get("plugins")
    if not isinstance(plugins, dict) or not any(str(name).endswith("?") for name in plugins):
        return
    settled: dict[Any, Any] = {}
    for name, options in plugins.items():
        plain = str(name).removesuffix("?")
        if plain == str(name):
            settled[name] = options
        elif plain.partition("@")[0] in registry.installed("plugin"):
            settled[plain] = options
            lines[f"plugins.{plain}"] = lines.get(f"plugins.{name}", 0)
        else:
            settled[name] = None
    values["plugins"] = settled


def check_shape(values: Mapping[str, Any], where: Where) -> None:
    """Refuse unknown keys, wrong nesting and import paths."""
    for key, value in values.items():
        if key not in TOP_LEVEL:
            raise RecipeError(f"{where(str(key))}: a recipe has no key {key!r}.{did_you_mean(str(key), TOP_LEVEL)}")
        if key in SECTIONS and not isinstance(value, Mapping):
            raise RecipeError(f"{where(key)}: {key} is {value!r}; write a mapping, as in {key}: {SECTIONS[key]}.")
        if key == "extends" and not _is_names(value):
            raise RecipeError(f"{where(key)}: extends is {value!r}; write a list of recipe names, as in [default].")
    for name, value in values.get("plugins", {}).items():
        if value is not None and not isinstance(value, Mapping):
            raise RecipeError(
                f"{where(f'plugins.{name}')}: plugins.{name} is {value!r}; write its options as a mapping "
                f"({name}: {{option: value}}), {{}} for its defaults, or null to remove it."
            )
    for key in _keys(values):
        if key.rpartition(".")[2] == "_target_":
            raise RecipeError(f"{where(key)}: {key} is refused: a recipe uses names, never import paths.")


def _is_names(value: Any) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    )


def _keys(value: Any, parent: str = "") -> Iterator[str]:
    """Yield every key at every depth, also of mappings inside lists."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        name = f"{parent}.{key}" if parent else str(key)
        yield name
        yield from _keys(inner, name)


def _installed() -> dict[str, tuple[Path, str]]:
    found: dict[str, tuple[Path, str]] = {}
    for entry in registry.installed("recipe").values():
        package = registry.origin(entry)
        for path in sorted(file for folder in _folders(entry.value) for file in folder.glob("*.yaml")):
            other, owner = found.setdefault(path.stem, (path, package))
            if other != path:
                raise RecipeError(
                    f"Two packages offer the recipe {path.stem!r}: {owner} ({other}) and {package} ({path}). "
                    "Uninstall one of them."
                )
    return dict(sorted(found.items()))


def _folders(package: str) -> list[Path]:
    """Return the folders of a package, without importing it."""
    top, *below = package.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return []
    return [Path(folder, *below) for folder in (spec.submodule_search_locations or [])] if spec else []


def _description(path: Path) -> str:
    """Return a recipe's description, or the error if it cannot be read, so that the list stays complete."""
    try:
        return str(read(path).values.get("description", ""))
    except (RecipeError, OSError) as error:
        return f"(cannot be read: {str(error).partition(chr(10))[0]})"
