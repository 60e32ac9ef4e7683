"""Recipe files: where they lie, what they extend, and on which line each of their keys stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge import registry
from forge.errors import RecipeError, did_you_mean

TOP_LEVEL = ("description", "extends", "task", "data", "trainer", "plugins")
SECTIONS = {"task": "{name: ...}", "data": "{name: ...}", "trainer": "{max_epochs: 10}", "plugins": "{clip: {}}"}
"""The sections of a recipe, each with an example of how it is written."""
Where = Callable[[str], str]
"""From a full key to the place where it was written."""


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """An installed recipe: its file, what it says of itself, and the package that ships it."""

    path: Path
    description: str
    package: str


def list_recipes() -> dict[str, RecipeFile]:
    """Every installed recipe by name, found without importing the packages that ship them."""
    return {name: RecipeFile(path, _description(path), package) for name, (path, package) in _installed().items()}


@dataclass(slots=True)
class SourceFile:
    """A recipe file as it was read: its values, nothing resolved yet, and the line of each key."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    def where(self, key: str) -> str:
        """The place of a key; one that the file only implies (through an anchor) has its parent's."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path.name}:{self.lines[key]}" if key else self.path.name


def omegaconf() -> Any:
    """OmegaConf, or an error that says how to get it or do without."""
    try:
        import omegaconf
    except ImportError as error:
        raise RecipeError("Recipes need omegaconf: pip install omegaconf, or pass plugins=[...] instead.") from error
    return omegaconf


def locate(name: str | Path, beside: Path | None = None) -> Path:
    """The file of a recipe given by name or path; a path inside a recipe is relative to that recipe."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        path = beside.parent / path if beside else path
        if not path.is_file():
            raise RecipeError(f"There is no recipe file {str(path)!r}.{did_you_mean(path.stem, _installed())}")
        return path
    known = _installed()
    if str(name) not in known:
        what = f"{beside.name} extends {str(name)!r}, which is not installed." if beside else ""
        what = what or f"No recipe is called {str(name)!r}."
        raise RecipeError(f"{what}{did_you_mean(str(name), known)}")
    return known[str(name)][0]


def with_bases(path: Path) -> list[SourceFile]:
    """A recipe after all that it extends, each file once: a base shared by two of them cannot undo what one changed."""
    done: dict[Path, SourceFile] = {}

    def visit(path: Path, chain: list[Path]) -> None:
        path = path.resolve()
        if path in chain:
            names = [file.stem for file in [*chain[chain.index(path) :], path]]
            raise RecipeError(f"Recipes extend each other in a circle: {' -> '.join(names)}. Break it in one of them.")
        if path in done:
            return
        file = read(path)
        bases = file.values.pop("extends", None) or []
        for base in [bases] if isinstance(bases, str) else bases:
            visit(locate(base, beside=path), [*chain, path])
        done[path] = file

    visit(path, [])
    *bases, own = done.values()
    for base in bases:
        base.values.pop("description", None)  # a recipe does not inherit what another says of itself
    return [*bases, own]


def read(path: Path) -> SourceFile:
    """Read one file, unresolved, and refuse what no recipe can hold."""
    lib = omegaconf()
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise RecipeError(f"{path.name} is no recipe: write a mapping with keys among {', '.join(TOP_LEVEL)}.")
        values = lib.OmegaConf.to_container(lib.OmegaConf.load(path), resolve=False) if root else {}
    except (yaml.YAMLError, lib.errors.OmegaConfBaseException, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name} cannot be read as YAML: {error}") from error
    file = SourceFile(path, values, dict(_lines(root)) if root else {})
    check_shape(values, file.where)
    return file


def check_shape(values: Mapping[str, Any], where: Where) -> None:
    """Refuse what is wrong whatever the plugins are: unknown keys, wrong nesting, import paths."""
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
            raise RecipeError(f"{where(key)}: {key} is refused: a recipe picks by names, never import paths.")


def _is_names(value: Any) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    )


def _keys(value: Any, parent: str = "") -> Iterator[str]:
    """Every key at every depth, those of mappings inside lists included."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        name = f"{parent}.{key}" if parent else str(key)
        yield name
        yield from _keys(inner, name)


def _lines(node: Any, parent: str = "") -> Iterator[tuple[str, int]]:
    """The line of every key of a YAML mapping, by full key."""
    for key, value in node.value:
        name = f"{parent}.{key.value}" if parent else str(key.value)
        yield name, key.start_mark.line + 1
        if value.id == "mapping":
            yield from _lines(value, name)


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
    """Where a package lies; only the finder of its top level is asked, so that nothing is imported."""
    top, *below = package.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return []
    return [Path(folder, *below) for folder in (spec.submodule_search_locations or [])] if spec else []


def _description(path: Path) -> str:
    """A recipe's description; one that cannot be read says so instead of breaking the list."""
    try:
        return str(read(path).values.get("description", ""))
    except (RecipeError, OSError) as error:
        return f"(cannot be read: {str(error).partition(chr(10))[0]})"
