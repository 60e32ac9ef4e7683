"""The wheel in an environment that has nothing but what it requires; and the versions that were tested."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import make_constraints
from tests.conftest import REPO, Run
from tests.test_package import packages_of_this_python, pip, wheel

__all__ = ["wheel"]

PACKAGES = ("forge", "forge_plugins", "forge_kernels", "forge_lightning", "forge_recipes")
SOURCES = [REPO / "forge", *(REPO / "plugins" / name for name in PACKAGES[1:4]), REPO / "recipes" / "forge_recipes"]

OTHERS = {
    "IPython": "notebooks have it",
    "pytest": "forge.testing.pytest_plugin is loaded by pytest itself",
    "lightning": "only where a LightningModule is trained",
    "pytorch_lightning": "as above",
    "torchmetrics": "only where a task has its metrics",
    "torchdata": "only where its loader is given",
    "torchft": "a nightly package: the plugin torchft says how to install it",
    "PIL": "torchvision requires it",
    "google": "tensorboard requires protobuf",
    "markupsafe": "jinja2 requires it",
    "fsspec": "torch requires it",
}
"""Packages that neither forge nor one of its extras requires, and why they may be imported."""

DEVELOPERS = {"dev", "docs", "browser", "bench"}
"""Extras that users do not install."""
ONLY_REQUIRED = """
import sys
from importlib.machinery import PathFinder


class OnlyRequired(PathFinder):
    hidden = frozenset({hidden!r})

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.hidden else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyRequired
"""
IMPORT_ALL = f"""
import importlib, pkgutil
missing = {{}}
for package in {PACKAGES!r}:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                missing[found.name] = error.name
for module, name in missing.items():
    print(module, name)
"""


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, in which packages that it does not require cannot be imported.

    Packages are those installed here: torch is not downloaded again."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    own = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    project = make_constraints.project()
    required = make_constraints.installed([Requirement(text) for text in project["dependencies"]]).keys()
    hidden = [
        name
        for name, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & {*required, "forge-trainer", "pip", "setuptools"}
    ]
    (own / "only_required.py").write_text(ONLY_REQUIRED.format(hidden=sorted(hidden)))
    (own / "packages_of_the_tests.pth").write_text("\n".join([*packages_of_this_python(), "import only_required"]))
    return python


@pytest.mark.slow
def test_a_bare_environment_hides_what_is_not_required(bare: Path, run_python: Run) -> None:
    assert run_python("-c", "import torch, tensorboard, rich", python=bare).returncode == 0
    for name in ("optuna", "transformers", "lightning", "torchmetrics", "pytest"):
        assert "ModuleNotFoundError" in run_python("-c", f"import {name}", python=bare).stderr


@pytest.mark.slow
def test_a_bare_environment_trains_the_quick_start(bare: Path, empty_folder: Path) -> None:
    done = subprocess.run(
        [bare.with_name("forge"), "fit", "quickstart"], cwd=empty_folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (run,) = empty_folder.glob("runs/quickstart/*")
    assert {"card.json", "metrics.jsonl", "weights.safetensors"} <= {path.name for path in run.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "word"), [("plugins", "checkpoint"), ("recipes", "quickstart"), ("--help", "fit")])
def test_the_command_works_in_a_bare_environment(bare: Path, empty_folder: Path, verb: str, word: str) -> None:
    done = subprocess.run([bare.with_name("forge"), verb], cwd=empty_folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert word in done.stdout


@pytest.mark.slow
def test_every_module_can_be_imported_in_a_bare_environment(bare: Path, run_python: Run) -> None:
    done = run_python("-c", IMPORT_ALL, python=bare)
    assert done.returncode == 0, done.stderr
    missing = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1)
    assert set(missing.values()) <= {"pytest", "lightning", "uvicorn", "prometheus_client", "starlette"}, missing
    assert all(".serving" in module for module, name in missing.items() if name not in ("pytest", "lightning")), missing


@pytest.mark.slow
def test_everything_imported_is_required() -> None:
    """By forge or by one of the extras that users install; what is not is named with its reason."""
    extras = make_constraints.project()["optional-dependencies"]
    texts = [text for name in extras if name not in DEVELOPERS for text in extras[name]]
    texts += make_constraints.project()["dependencies"]
    required = {canonicalize_name(Requirement(text).name) for text in texts}
    owners = packages_distributions()
    found = {name for folder in SOURCES for path in folder.rglob("*.py") for name in imported(path)}
    third = {name for name in found - set(sys.stdlib_module_names) if name not in PACKAGES and name not in OTHERS}
    assert {name for name in third if not {canonicalize_name(o) for o in owners.get(name, [name])} & required} == set()


def imported(path: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


# ---------------------------------------------------------------------------------------------------------------------
# tests/constraints.txt


def test_every_requirement_has_a_tested_version_in_bounds() -> None:
    pinned = make_constraints.pinned()
    for name, requirement in make_constraints.asked().items():
        assert name in pinned, f"{name}: python tests/make_constraints.py writes tests/constraints.txt again"
        assert requirement.specifier.contains(pinned[name], prereleases=True), f"{requirement}, tested {pinned[name]}"


def test_what_is_installed_here_is_within_the_bounds_too() -> None:
    here = make_constraints.installed(make_constraints.asked().values())
    assert "torch" in here
    for name, requirement in make_constraints.asked().items():
        if name in here:
            assert requirement.specifier.contains(version(name).partition("+")[0], prereleases=True), requirement
