"""Who imports whom: the kernel knows no plugin, and costs nothing until it is used."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forge
from forge import registry
from forge.contract import hooks
from forge.contract.stack import ACTIONS, SPECS
from tests import house

BLOCK = """
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by the test)", name=name)

blocked = {"torchvision", "omegaconf", "forge_plugins", "forge_recipes"}
sys.meta_path.insert(0, Block())
"""

STAGES = {
    "importing forge does not import torch": """
import forge, forge.testing
assert forge.__version__
assert not {"torch", "forge_kernels", "forge_lightning"} & sys.modules.keys()
""",
    "the Trainer does not import torch's compiler, which takes seconds": """
assert forge.Trainer and forge.TaskModule and forge.Plugin
assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
""",
    "the Trainer parses nothing and looks for no package before it is called": """
from forge import registry
assert not {"yaml", "statistics"} & sys.modules.keys()
assert not registry.installed.cache_info().currsize
""",
    "a fit needs neither torchvision nor omegaconf": """
from forge.testing import fit_tiny
task, result = fit_tiny([], max_updates=2)
assert result.updates == 2
""",
    "a fit loads no plugin and no recipe that nobody named": """
assert not {name.partition(".")[0] for name in sys.modules} & {"forge_plugins", "forge_recipes", "tensorboard", "rich"}
""",
    "kernels and the Lightning adapter are imported when they are used": """
import forge.testing
loaded = lambda: {name.partition(".")[0] for name in sys.modules} & {"forge_kernels", "forge_lightning"}
assert not loaded()
forge.testing.check_against_reference
assert loaded() == {"forge_kernels"}
forge.LightningAdapter
assert loaded() == {"forge_kernels", "forge_lightning"}
""",
    "the default recipe without omegaconf is refused by name": """
blocked -= {"forge_plugins", "forge_recipes"}
try:
    forge.Trainer(max_epochs=1)
except forge.RecipeError as error:
    assert "omegaconf" in str(error), error
else:
    raise AssertionError("the recipe 'default' was read without omegaconf")
""",
    "models of recipes need neither torchvision nor omegaconf": """
from forge_recipes.gpt import GPT; from forge_recipes.resnet import ResNet18
from forge_recipes.mlp import MLP
from forge_recipes.synthetic import images
data = images(size=28, channels=1, flat=True, samples=300)
forge.Trainer(max_updates=2, plugins=[], run_dir=False, device="cpu").fit(MLP(hidden=8), data.train)
from forge_recipes.fashion_mlp import FashionMLP; from forge_recipes.fashion_cnn import FashionCNN
from forge_recipes.fashion_mnist import fashion_mnist
assert len(fashion_mnist().train) == 10
FashionMLP(), FashionCNN()
assert not {"omegaconf", "torchvision"} & sys.modules.keys()
""",
    "every public kernel is a function, whatever was imported before": """
import types, forge_kernels.ops.softmax
from forge import kernels
assert callable(kernels.softmax)
assert set(kernels.__all__) <= set(dir(kernels))
assert not [n for n in kernels.__all__ if isinstance(getattr(kernels, n), types.ModuleType)]
""",
    "without a compiler all_finite is plain torch, and says so once": """
import logging, os, tempfile, torch
os.environ["CXX"], os.environ["TORCH_EXTENSIONS_DIR"] = "no-such-compiler", tempfile.mkdtemp()
said = []
listening = logging.Handler()
listening.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(listening)
logging.getLogger().setLevel("INFO")
from forge_kernels import all_finite
assert not os.listdir(os.environ["TORCH_EXTENSIONS_DIR"]), "built at import"
assert all_finite([torch.ones(3)]) and not all_finite([torch.ones(3), torch.tensor(float("nan"))])
told = [each for each in said if "forge.kernels.all_finite runs as plain torch" in each]
assert len(told) == 1 and "no-such-compiler: not found" in told[0], said
""",
    "every module of the kernel loads without plugins and recipes": """
for name in [name for name in sys.modules if name.partition(".")[0] in ("forge", "forge_plugins", "forge_recipes")]:
    del sys.modules[name]
blocked |= {"forge_plugins", "forge_recipes"}
blocked -= {"torchvision", "omegaconf"}
import forge
for module in pkgutil.iter_modules(forge.__path__):
    if module.name != "__main__":
        importlib.import_module(f"forge.{module.name}")
assert not {name.partition(".")[0] for name in sys.modules} & {"forge_plugins", "forge_recipes"}
""",
}
"""What is tried in one fresh process, one after the other, with some packages out of reach."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, small_data_folder: Path) -> dict[str, str]:
    """How each of the stages ended: "", or its traceback."""
    code = f"""
import importlib.abc, json, pkgutil, sys, traceback
{BLOCK}
outcomes, scope = {{}}, {{**globals()}}
for name, text in {STAGES!r}.items():
    try:
        exec(text, scope)
        outcomes[name] = ""
    except BaseException:
        outcomes[name] = traceback.format_exc()
print("\\n" + json.dumps(outcomes))
"""
    environment = {**os.environ, "FORGE_DATA": str(small_data_folder), "PYTHONSAFEPATH": "1"}
    command, folder = [sys.executable, "-c", code], tmp_path_factory.mktemp("stages")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_imported_and_what_need_not_be_there(stage: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[stage], outcomes[stage]


# ---------------------------------------------------------------------------------------------------------------------
# Built-in plugins


def built_in_names() -> set[str]:
    return {name for name, entry in registry.installed("plugin").items() if entry.module.startswith("forge_plugins")}


def test_a_built_in_plugin_imports_no_other() -> None:
    ours = [module for module in house.MODULES if module.startswith("forge_plugins.")]
    assert ours
    for module in ours:
        allowed = (f"forge_plugins.{module.split('.')[1]}", "forge_plugins.torch_internals")
        siblings = {name for name in house.imports(module) if name.startswith("forge_plugins.")}
        assert all(name.startswith(allowed) for name in siblings), module


def test_no_built_in_plugin_names_another() -> None:
    names = built_in_names()
    for name in names:
        kind = registry.load("plugin", name)
        declared = {*kind.requires, *kind.conflicts, *kind.before, *kind.after}
        assert not declared & names, name


def test_every_built_in_plugin_can_be_imported_by_its_class() -> None:
    package = importlib.import_module("forge_plugins")
    for name in built_in_names():
        kind = registry.load("plugin", name)
        assert getattr(package, kind.__name__) is kind


# ---------------------------------------------------------------------------------------------------------------------
# What is public


def test_every_public_name_resolves() -> None:
    assert not [name for name in forge.__all__ if getattr(forge, name) is None]


def test_public_names_are_sorted_and_typos_are_errors() -> None:
    assert set(dir(forge)) >= set(forge.__all__)
    with pytest.raises(AttributeError, match="Trainr"):
        _ = forge.Trainr


def test_every_hook_says_what_it_is() -> None:
    for hook in SPECS:
        doc = inspect.getdoc(getattr(hooks, hook)) or ""
        assert doc.startswith("Action" if hook in ACTIONS else "Event"), hook
