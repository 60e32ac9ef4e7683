"""The target of a verb: a recipe by name or file, or a task from the user's Python file, with overrides."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from forge.config import Recipe, list_recipes, read_recipe
from forge.config.recipe import DEFAULT
from forge.config.schema import options_of
from forge.config.trainer_defaults import Settings
from forge.errors import ForgeError, did_you_mean
from forge.util import show
from forge.util.frames import is_library

if TYPE_CHECKING:
    from forge.contract.task import TaskModule
    from forge.data import Splits
    from forge.engine.trainer import Trainer

EPOCHS = 10
"""Length of a fit on a task from a file, unless its recipe or the command line sets one."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of every verb that works on a recipe."""
    parser.add_argument(
        "target",
        metavar="RECIPE",
        help="an installed recipe's name, FILE.yaml, or FILE.py:Task: a task of your own, or a function that makes it",
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="e.g. trainer.max_epochs=3 task.lr=1e-3 PLUGIN.OPTION=VALUE"
    )
    parser.add_argument("--recipe", metavar="NAME", help="a stack to use: fast, frugal, debug, ...")
    parser.add_argument("--data", metavar="FILE.py:function", help="a function that returns (train, val) or Splits")
    parser.add_argument(
        "-p",
        dest="plugins",
        metavar="NAME",
        action="append",
        default=[],
        help="add a plugin with its defaults; no:NAME removes one; may be repeated",
    )


def refuse_options(verb: str, args: Namespace, unknown: list[str], parser: ArgumentParser) -> None:
    """Refuse options that a verb does not have; one that the task, the data or a plugin has is shown as an override."""
    name, equals, value = unknown[0].partition("=")
    value = value if equals else next((word for word in unknown[1:2] if not word.startswith("-")), "VALUE")
    name = name.lstrip("-").replace("-", "_")
    if hasattr(args, "target") and not unknown[0].startswith("--"):
        meant = f" An override is key=value, as in task.{name}={value}."
    elif hasattr(args, "target"):
        places = _sections_with(name, args)
        shown = " or ".join(f"{place}.{name}={value}" for place in places or ["task"])
        meant = f" Options of the task, the data, the Trainer and plugins are overrides: {shown}."
    else:
        meant = did_you_mean(unknown[0], [flag for action in parser._actions for flag in action.option_strings])
    raise ForgeError(f"forge {verb} has no option {unknown[0]!r}.{meant}")


def _sections_with(name: str, args: Namespace) -> list[str]:
    """Return the sections of the recipe that have an option of this name."""
    try:
        recipe = load(args)
        found = [
            section
            for section in ("task", "data")
            for option in options_of(section, recipe.config, recipe.local, recipe.origin) or ()
            if option.name == name
        ]
        found += [plugin for plugin, options in recipe.resolved.get("plugins", {}).items() if name in options]
    except ForgeError:
        found = []
    return [*found, *(["trainer"] if name in {field.name for field in fields(Settings)} else [])]


def same_target(args: Namespace, changes: Mapping[str, Any] | None = None, **instead: Any) -> list[str]:
    """Return the arguments that name the same recipe, task, data and stack, with other overrides or arguments."""
    given, changes = {**vars(args), **instead}, changes or {}
    kept = [text for text in given["overrides"] if text.partition("=")[0] not in changes]
    named = [("--recipe", given["recipe"]), ("--data", given["data"]), *(("-p", name) for name in given["plugins"])]
    options = [word for flag, value in named if value for word in (flag, value)]
    return [args.target, *kept, *(f"{key}={value}" for key, value in changes.items()), *options]


def load_seeded(args: Namespace) -> Recipe:
    """Load the recipe to train with, with a seed where it has none, so that a measurement can be repeated."""
    recipe = load(args, to_train=True)
    return recipe.with_trainer({"seed": 0}) if recipe.trainer.get("seed") is None else recipe


def load(args: Namespace, to_train: bool = False) -> Recipe:
    """Load the recipe that the arguments describe, with the user's own task and data in it, and check it."""
    return read(args, to_train).checked()


def read(args: Namespace, to_train: bool = False) -> Recipe:
    """Like `load`, unchecked and without defaults."""
    add = [name for name in args.plugins if not name.startswith("no:")]
    remove = [name.removeprefix("no:") for name in args.plugins if name.startswith("no:")]
    name, stack, task, data = args.target, args.recipe, None, None
    if _is_python(args.target):
        name, stack = args.recipe or "default", None
        task, module = task_maker(args.target)
        named = any(text.startswith("data.name=") for text in args.overrides)
        data = None if named else getattr(module, "data", None)
    else:
        _refuse_module_name(args.target)
    if args.data:
        if not _is_python(args.data):
            raise ForgeError(f"--data takes FILE.py:function, not {args.data!r}. A data set by name is data.name=NAME.")
        data = function(args.data)
    recipe = read_recipe(name, args.overrides, add, remove, stack=stack, task=task, data=data)
    if to_train and task is not None and not {"max_epochs", "max_updates", "max_time"} & recipe.trainer.keys():
        overrides = [*args.overrides, f"trainer.max_epochs={EPOCHS}"]
        recipe = read_recipe(name, overrides, add, remove, stack=stack, task=task, data=data)
        recipe.origin["trainer.max_epochs"] = DEFAULT
    return recipe


def build(recipe: Recipe, run_dir: str | Path | bool | None) -> tuple[Trainer, TaskModule, Splits]:
    """Build the Trainer, which sets the seed, then the task and the data."""
    from forge.engine.trainer import Trainer

    given: dict[str, Any] = {} if run_dir is None else {"run_dir": run_dir}
    trainer = Trainer(recipe=recipe, **given)
    return trainer, *trainer.build()


def name_of(recipe: Recipe) -> str:
    """Return the recipe's name, or that of the user's own task."""
    return recipe.local["task"].__name__ if "task" in recipe.local else recipe.name


def _is_python(target: str) -> bool:
    return target.endswith(".py") or ".py:" in target


def _refuse_module_name(target: str) -> None:
    """Refuse mine:Mine, as Python names modules, because forge takes files. A recipe may share a file's name."""
    module, colon, name = target.partition(":")
    files = [file for file in (f"{module}.py", f"{module.replace('.', '/')}.py") if Path(file).is_file()]
    if not colon and (not files or target in list_recipes()):
        return
    meant = f" Did you mean '{files[0]}{colon}{name}'?" if files else " A task of your own is FILE.py:Task."
    raise ForgeError(f"No recipe is called {target!r}.{meant}")


def task_maker(target: str) -> tuple[Callable[..., TaskModule], ModuleType]:
    """Return the class of FILE.py:Task, or the function FILE.py:function that makes one, and its module.

    A file with one task needs no name.
    """
    module, name = _import(target)
    maker = getattr(module, name, None) if name else None
    return maker if inspect.isfunction(maker) else _task_class(target, module, name), module


def _task_class(target: str, module: ModuleType, name: str) -> type[TaskModule]:
    from forge.contract.task import TaskModule
    from forge.diagnose.checks import is_lightning

    here = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    own = {key: value for key, value in here.items() if issubclass(value, TaskModule)}
    foreign = [key for key, value in here.items() if is_lightning(value) and key not in own]
    name = name or ("" if len(own or foreign) != 1 else next(iter(own or foreign)))
    if not name:
        raise ForgeError(f"{target} has {len(own) or 'no'} tasks; name one: {target}:Task.{did_you_mean('', own)}")
    kind = getattr(module, name, None)
    if kind is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ForgeError(f"{target}: the file has no {name!r}.{did_you_mean(name, [*own, *functions])}")
    if isinstance(kind, type) and issubclass(kind, TaskModule):
        return kind
    if isinstance(kind, type) and is_lightning(kind):
        raise ForgeError(
            f"{target}: {name} is a LightningModule. Wrap it in a task, in the same file, and name that one:\n"
            f"  class Run{name}(forge.LightningAdapter):\n"
            "      def __init__(self):\n"
            f"          super().__init__({name}())"
        )
    raise ForgeError(f"{target}: {name} is no subclass of forge.TaskModule.{did_you_mean(name, own)}")


def function(target: str) -> Callable[..., Any]:
    """Return the function of FILE.py:function; `data` if the file alone is given."""
    module, name = _import(target)
    name = name or "data"
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    found = getattr(module, name, None)
    if not callable(found):
        raise ForgeError(f"{target}: the file has no function {name!r}.{did_you_mean(name, functions)}")
    return found


def task_and_data(args: Namespace) -> tuple[Callable[..., TaskModule] | None, Callable[..., Any] | None]:
    """Return what --task and --data name; without --data the function `data` beside the task, which a fit takes too."""
    task, module = task_maker(args.task) if args.task else (None, None)
    return task, function(args.data) if args.data else getattr(module, "data", None)


_imported: dict[Path, ModuleType] = {}


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compile the file from its source: Python trusts bytecode by size and whole seconds, so a file that is edited
    twice within a second would run its old code."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(target: str) -> tuple[ModuleType, str]:
    """Import the file of FILE.py:NAME by its path; its folder can be imported from, as if Python ran the file."""
    file, _, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    path = Path(file).resolve()
    if not path.is_file():
        raise ForgeError(f"No file {file!r}.{_similar_files(Path(file))}")
    if path in _imported:
        return _imported[path], name
    label = path.stem if path.stem not in sys.modules else f"{path.stem}_of_{path.parent.name}"
    loader = _FromSource(label, str(path))
    spec = importlib.util.spec_from_file_location(label, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[label] = module  # data workers find classes by their module's name
    try:
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[label]
        if isinstance(error, Exception) and not isinstance(error, ForgeError):
            raise ForgeError(f"{file} cannot be imported: {_cause(error)}") from error
        raise
    _imported[path] = module
    return module, name


def _similar_files(file: Path) -> str:
    """Suggest files of the same folder."""
    there = [str(path) for path in file.parent.glob("*.py")]
    return did_you_mean(str(file), get_close_matches(str(file), there, n=1) or (there if len(there) <= 10 else ()))


def _cause(error: Exception) -> str:
    """Return the error and the lines of the user's files in its traceback."""
    message = f"{type(error).__name__}: {error}"
    lines = [(frame.filename, frame.lineno, frame.line) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):  # the line with the error is in no frame
        message = f"{type(error).__name__}: {error.msg}"
        lines.append((error.filename or "", error.lineno, error.text))
    packages = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "purelib", "platlib"))
    own = [
        f"  {show.near(Path(file))}:{line}: {(text or '').strip()}"
        for file, line, text in lines
        if file and not file.startswith(packages) and not is_library(file)
    ]
    return "\n".join([message, *own])
