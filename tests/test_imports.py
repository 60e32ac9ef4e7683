"""Who imports whom: the kernel knows no plugin, and costs nothing until it is used."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import forge
from forge import registry
from forge.contract import hooks
from forge.contract.stack import ACTIONS, SPECS
from tests.conftest import REPO, Run

KERNEL = sorted((REPO / "forge").rglob("*.py"))
PACKAGE = REPO / "plugins" / "forge_plugins"
PLUGINS = sorted(PACKAGE.rglob("*.py"))

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, Block())
"""


def imported_names(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", KERNEL, ids=lambda path: str(path.relative_to(REPO)))
def test_the_kernel_imports_neither_plugins_nor_recipes(path: Path) -> None:
    outside = {name for name in imported_names(path) if name.partition(".")[0] in ("forge_plugins", "forge_recipes")}
    assert not outside


def test_every_module_of_the_kernel_loads_without_plugins_and_recipes(run_python: Run) -> None:
    modules = [f"forge.{m.name}" for m in pkgutil.iter_modules(forge.__path__) if m.name != "__main__"]
    code = (
        BLOCK.format(blocked=["forge_plugins", "forge_recipes"])
        + f"""
import importlib
for name in {modules!r}:
    importlib.import_module(name)
assert not {{name.partition(".")[0] for name in sys.modules}} & {{"forge_plugins", "forge_recipes"}}
"""
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_importing_forge_does_not_import_torch(run_python: Run) -> None:
    done = run_python("-c", "import sys, forge; assert forge.__version__; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_a_fit_needs_neither_torchvision_nor_omegaconf(run_python: Run) -> None:
    code = (
        BLOCK.format(blocked=["torchvision", "omegaconf"])
        + """
import forge
from forge.testing import fit_tiny
task, result = fit_tiny([], max_updates=2)
assert result.updates == 2
assert "omegaconf" not in sys.modules and "torchvision" not in sys.modules
try:
    forge.Trainer(max_epochs=1)
except forge.RecipeError as error:
    assert "omegaconf" in str(error), error
else:
    raise AssertionError("the recipe 'default' was read without omegaconf")
"""
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_training_does_not_load_recipes_and_plugins_that_nobody_named(run_python: Run) -> None:
    code = """
import sys
from forge.testing import fit_tiny
fit_tiny([], max_updates=2)
assert not {name.partition(".")[0] for name in sys.modules} & {"forge_plugins", "forge_recipes", "tensorboard", "rich"}
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Built-in plugins


def built_in_names() -> set[str]:
    return {name for name, entry in registry.installed("plugin").items() if entry.module.startswith("forge_plugins")}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_built_in_plugin_imports_no_other(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own != "__init__":
        siblings = {name for name in imported_names(path) if name.startswith("forge_plugins.")}
        shared = {name for name in siblings if name.startswith("forge_plugins._")}
        assert all(name.startswith(f"forge_plugins.{own}") for name in siblings - shared)


def test_no_built_in_plugin_names_another() -> None:
    names = built_in_names()
    for name in names:
        kind = registry.load("plugin", name)
        declared = {*kind.requires, *kind.conflicts, *kind.before, *kind.after}
        assert not declared & names, name


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.stem)
def test_a_built_in_plugin_asks_for_no_priority(path: Path) -> None:
    keywords = {node.arg for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword)}
    assert not keywords & {"tryfirst", "trylast"}


def test_every_built_in_plugin_can_be_imported_by_its_class() -> None:
    package = importlib.import_module("forge_plugins")
    for name in built_in_names():
        kind = registry.load("plugin", name)
        assert getattr(package, kind.__name__) is kind


# ---------------------------------------------------------------------------------------------------------------------
# What is public


@pytest.mark.parametrize("name", forge.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(forge, name) is not None


def test_public_names_are_sorted_and_a_typo_is_an_attribute_error() -> None:
    assert set(dir(forge)) >= set(forge.__all__)
    with pytest.raises(AttributeError, match="Trainr"):
        _ = forge.Trainr


@pytest.mark.parametrize("hook", SPECS)
def test_every_hook_says_what_it_is(hook: str) -> None:
    doc = inspect.getdoc(getattr(hooks, hook)) or ""
    assert doc.startswith("Action" if hook in ACTIONS else "Event")
