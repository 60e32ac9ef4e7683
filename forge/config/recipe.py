"""Recipe: a loaded recipe, and the functions that load one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from forge import options
from forge.config.build import make_plugin
from forge.config.files import SECTIONS, SourceFile, check_shape, locate, settle_optional, with_bases
from forge.config.guard import LIMITS, omegaconf, parse
from forge.config.merge import COMMAND_LINE, Layers, leaves, plain
from forge.config.schema import TASK, Maker, check_plugin, check_section, label, maker_of, taken_from_recipe
from forge.config.trainer_defaults import FOLDERS
from forge.contract.plugin import Plugin
from forge.errors import RecipeError
from forge.util.files import absolute

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from omegaconf.basecontainer import BaseContainer

    from forge.contract.task import TaskModule
    from forge.data import Splits

DEFAULT = "default"
SHORT = 3 * LIMITS["keys and values"]
"""Characters in which no recipe can be too large: a value takes at least three."""
PYTHON = "Python"
"""The origin of what is given in code."""


Given: TypeAlias = "str | Path | Mapping[str, Any] | BaseContainer | Recipe"
"""What `recipe=` takes. A DictConfig is a mapping, but what OmegaConf.merge returns is declared as any container."""


@dataclass
class Recipe:
    """A recipe as it was read, with the origin of every value; `trainer.recipe` is one."""

    name: str
    config: dict[str, Any]
    "The given values, merged and with interpolations resolved."
    origin: dict[str, str]
    'The origin of each value, by full key: "quickstart.yaml:12", "command line", "Python" or "default".'
    resolved: dict[str, Any] = field(default_factory=dict)
    "`config` with every default filled in."
    local: dict[str, Maker] = field(default_factory=dict)
    'The "task" class or function and "data" function that were given in code, instead of those that the recipe names.'
    built: dict[str, Plugin] = field(default_factory=dict, repr=False)
    "Plugins that were built when their options were checked; `make_plugins` returns each once."

    @property
    def description(self) -> str:
        return self.config.get("description", "")

    @property
    def plugins(self) -> dict[str, dict[str, Any]]:
        """Return the given options by plugin, in stack order."""
        return self.config.get("plugins", {})

    @property
    def trainer(self) -> dict[str, Any]:
        """Return the given options of the Trainer."""
        return self.config.get("trainer", {})

    def checked(self, unbuilt: Collection[str] = ()) -> Recipe:
        """Check every option, fill in defaults and build the plugins, but for those in `unbuilt`."""
        self.resolved = {"description": self.description} if self.description else {}
        for section in SECTIONS:
            if section == "plugins" and section in self.config:
                checked = {
                    name: check_plugin(name, values, self.origin, name not in unbuilt)
                    for name, values in self.plugins.items()
                }
                self.resolved[section] = {name: values for name, (values, _) in checked.items()}
                self.built = {name: plugin for name, (_, plugin) in checked.items() if plugin is not None}
            elif section in self.config or section in self.local or section == "trainer":
                self.resolved[section] = check_section(section, self.config, self.local, self.origin)
        self.origin |= {key: DEFAULT for key, _ in leaves(self.resolved) if key not in self.origin}
        return self

    def with_trainer(self, settings: Mapping[str, Any]) -> Recipe:
        """Return this recipe with other settings for the Trainer, given in code."""
        if not settings:
            return self
        origin = self.origin | {f"trainer.{key}": PYTHON for key in settings}
        trainer = {**self.trainer, **settings}
        return replace(self, config={**self.config, "trainer": trainer}, origin=origin)

    def with_data(self, changed: Mapping[str, Any]) -> Recipe:
        """Return this recipe with other options of its data."""
        if not changed:
            return self
        return replace(self, config={**self.config, "data": {**self.config.get("data", {}), **changed}}, built={})

    def make_plugins(self, names: Iterable[str]) -> list[Plugin]:
        """Return these plugins of the recipe, built with its options."""
        return [self.built.pop(name, None) or make_plugin(name, self.plugins[name]) for name in names]

    def make_task(self) -> TaskModule:
        """Build the recipe's task with its options."""
        from forge.contract.task import TaskModule

        task = self._make("task", "name your own on the command line: FILE.py:Task")
        if not isinstance(task, TaskModule):
            maker = maker_of("task", self.config, self.local, self.origin)
            whose = getattr(maker, "__qualname__", maker)
            raise RecipeError(f"{whose} made a {type(task).__name__}; it must return a forge.TaskModule.")
        return task

    def make_data(self, task: TaskModule | None = None) -> Splits:
        """Build the loaders of the recipe's data set, for this task where they depend on one; by default a new one."""
        from forge.data import Splits

        task_of = cache(lambda: self.make_task() if task is None else task)
        otherwise = "write a function data() beside your task, or pass --data FILE.py:function"
        splits = self._make("data", otherwise, task_of)
        if type(splits) is tuple and 2 <= len(splits) <= 4:  # train, val, test, predict
            splits = Splits(*splits)
        if not isinstance(splits, Splits):
            whose = self.local["data"].__qualname__ if "data" in self.local else self.config["data"]["name"]
            raise RecipeError(
                f"The data function {whose!r} returned a {type(splits).__name__}; return (train, val), or "
                "forge.data.Splits(train=..., val=...)."
            )
        for loader in splits.live_loaders():
            loader.attach(task_of())
        return splits

    def to_yaml(self) -> str:
        """Write one self-contained recipe, without `extends`: loading it gives the same config."""
        conf = omegaconf()
        notes = [
            f"# {section}: {maker.__qualname__} of {maker.__module__} was given in code; give it again.\n"
            for section, maker in self.local.items()
        ]
        return "".join(notes) + conf.to_yaml(conf.create(_escaped(self.config)))

    def _make(self, section: str, otherwise: str, task_of: Callable[[], TaskModule] | None = None) -> Any:
        maker = maker_of(section, self.config, self.local, self.origin)
        if maker is None:
            raise RecipeError(
                f"The recipe {self.name!r} names no {section}. Write {section}: {SECTIONS[section]} in it, or "
                f"{otherwise}."
            )
        values = {key: value for key, value in self.config.get(section, {}).items() if key != "name"}
        known = taken_from_recipe(maker, section)
        handed = {TASK: task_of()} if task_of is not None and len(known) < len(options.of_callable(maker)) else {}
        return maker(**handed, **options.check(known, values, section))


def recipe(
    name: str | Path,
    overrides: Sequence[str] = (),
    *,
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    stack: str | Path | None = None,
) -> DictConfig:
    """Return an installed recipe by name, or a .yaml file by path, as a DictConfig, with every option checked.

    `overrides` are "key=value" as on the command line; `add` and `remove` name plugins; `stack` is a second recipe,
    one without a task, merged over the first. What you change in it is yours: `OmegaConf.merge(forge.recipe("default"),
    {"trainer": {"seed": 1}})`. Give it to `forge.Trainer(recipe=...)`.
    """
    layers = _layers(name, overrides, add, remove, stack, {})
    _recipe_of(name, layers, {}).checked()
    return omegaconf().create(layers.ordered)


def as_recipe(given: Given) -> Recipe:
    """Return the recipe that a Trainer was given, unchecked: by name, by path, or as a DictConfig."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, (str, Path)):
        return read_recipe(given)
    if isinstance(given, Mapping):
        return _from_python(given)
    raise RecipeError(f"recipe={str(given)[:80]}: write a recipe's name, its file, or a DictConfig as of forge.recipe.")


def _from_python(given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a DictConfig, or of plain mappings, whose values the user's own code chose."""
    config = options.plain(plain(given, lambda key: f"{key} ({PYTHON})"))
    if "extends" in config:
        raise RecipeError("extends (Python): only files extend others. Read the file by forge.recipe('FILE.yaml').")
    settle_optional(config, {})
    check_shape(config, lambda key: PYTHON)
    if "plugins" in config:
        config["plugins"] = {name: given for name, given in config["plugins"].items() if given is not None}
    kept = [*(key for key, _ in leaves(config)), *(f"plugins.{name}" for name in config.get("plugins", {}))]
    found = Recipe(config.get("task", {}).get("name", "python"), config, dict.fromkeys(kept, PYTHON))
    parse(found.to_yaml(), "The recipe given in Python")  # a run writes it, and is to read it again
    return found


def _refuse_outside_folders(recipe: Recipe) -> None:
    """Raise if a recipe file names a run folder outside the working directory; the user's command line may.

    The folder of runs may be a link to another disk.
    """
    for setting in FOLDERS:
        key, value = f"trainer.{setting}", recipe.trainer.get(setting)
        if not isinstance(value, str) or value == "auto" or recipe.origin.get(key) in (COMMAND_LINE, PYTHON):
            continue
        real, *inside = (Path(os.path.realpath(absolute(folder))) for folder in (value, ".", "runs"))
        if Path(value).is_absolute() or not any(map(real.is_relative_to, inside)):
            raise RecipeError(
                f"{label(key, recipe.origin)} is {value!r}, which is outside the working directory: in a recipe it is "
                "relative and inside. To use another folder, give it with --run-dir, or in Python."
            )


def read_recipe(
    name: str | Path,
    overrides: Sequence[str] = (),
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    *,
    stack: str | Path | None = None,
    task: Maker | None = None,
    data: Maker | None = None,
) -> Recipe:
    """Return a recipe by name or path, unchecked and without defaults; tasks, data and plugins are not imported.

    `task` and `data` replace the task and data that the recipe names; the others are as in `recipe`.
    """
    local: dict[str, Maker] = {key: given for key, given in (("task", task), ("data", data)) if given is not None}
    return _recipe_of(name, _layers(name, overrides, add, remove, stack, local), local)


def _layers(
    name: str | Path,
    overrides: Sequence[str],
    add: Sequence[str],
    remove: Sequence[str],
    stack: str | Path | None,
    local: Mapping[str, Maker],
) -> Layers:
    """Return a recipe with its bases, merged with what is given beside it."""
    layers = Layers()
    files = list(with_bases(locate(name)))
    if stack is not None:
        files += _over(stack, files)
    for file in files:
        layers.add(file.values, file.where)
    for section in local:
        if "name" in layers.values.get(section, {}):  # options of another task or data set do not apply
            layers.drop(section)
    layers.change_stack(add, remove)
    layers.override(overrides, local)
    return layers


def _recipe_of(name: str | Path, layers: Layers, local: dict[str, Maker]) -> Recipe:
    """Return the recipe that merged layers make, with references resolved."""
    for section, maker in local.items():
        if "name" in layers.values.get(section, {}):
            kind = {"data": "data set"}.get(section, section)
            whose = f"{section}.name is the name of an installed {kind}, and {maker.__qualname__!r} was given instead."
            own = any(option.name == "name" for option in options.of_callable(maker))
            cure = "Its parameter 'name' cannot be set by a recipe: rename it." if own else "Leave one of them out."
            raise RecipeError(f"{whose} {cure}")
    config = layers.resolved()
    kept = {key for key, _ in leaves(config)} | {f"plugins.{name}" for name in config.get("plugins", {})}
    origin = {key: at for key, at in layers.origin.items() if key in kept}
    found = Recipe(Path(name).stem, config, origin, local=local)
    _refuse_outside_folders(found)
    if len(str(config)) > SHORT:  # a run writes it, and is to read it again
        parse(found.to_yaml(), f"{found.name}, merged")
    return found


def _over(stack: str | Path, files: list[SourceFile]) -> list[SourceFile]:
    """Return the files of a stack to merge over `files`, without the bases that those have too."""
    there = {file.path for file in files}
    over = [file for file in with_bases(locate(stack)) if file.path not in there]
    for file in over:
        for section in ("task", "data"):
            if section in file.values:
                raise RecipeError(
                    f"{file.where(section)}: {file.path.stem!r} names its own {section}, so it cannot be merged over "
                    "another recipe. Stacks are recipes with plugins alone, such as fast, frugal or debug."
                )
    return over


def _escaped(value: Any) -> Any:
    """Escape `${` in plain data, so that it is read again as text."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    # OmegaConf reads \${ as a plain ${, and halves the backslashes before it
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
