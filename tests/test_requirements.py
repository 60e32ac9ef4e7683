"""What is imported is required; and the versions that were tested."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import make_constraints
from tests.conftest import REPO

SOURCES = [REPO / "forge", *(REPO / "plugins").glob("forge_*"), REPO / "recipes" / "forge_recipes"]
PACKAGES = [folder.name for folder in SOURCES]

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


@pytest.mark.slow
def test_everything_imported_is_required() -> None:
    """By forge or by one of the extras that users install; what is not is named with its reason."""
    texts: list[str] = []
    for project in make_constraints.projects():
        extras = project.get("optional-dependencies", {})
        texts += [text for name in extras if name not in DEVELOPERS for text in extras[name]]
        texts += project["dependencies"]
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
