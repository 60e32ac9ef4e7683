"""The wheel holds everything, and works away from the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from forge.registry import GROUPS
from tests.conftest import REPO

TOLD = ("command", "plugin", "name")
"""Kinds whose names people miss where a package is not installed."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, built as a release would be."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", REPO, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    """What is in the folders of the packages is shipped; tests, benchmarks and examples are not."""
    packages = {"forge": "forge", "forge_recipes": "recipes/forge_recipes", "forge_plugins": "plugins/forge_plugins"}
    sources = {f"{package}/{file}" for package, folder in packages.items() for file in files(REPO / folder)}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {"forge/py.typed", "forge_plugins/clip.py", "forge_recipes/digits.npz"} < sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


PROJECTS = [REPO, *sorted(path.parent for path in (REPO / "plugins").glob("forge_*/pyproject.toml"))]


ABOUT = {"LICENSE", "PKG-INFO", "README.md", "CHANGELOG.md", "pyproject.toml", ".gitignore"}
"""What stands beside a package."""


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_a_wheel_is_the_same_from_the_tree_and_from_the_sdist(project: Path, tmp_path: Path) -> None:
    """Byte for byte; so a build depends on the sources alone, and the sdist lacks none of them. Nor has it others."""
    trees, wheels = [project], []
    for folder in (tmp_path / "first", tmp_path / "again"):
        build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
        subprocess.run(build, cwd=trees[-1], check=True, capture_output=True)
        (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        wheels.append(wheel)
        shutil.unpack_archive(sdist, folder)
        trees.append(folder / sdist.name.removesuffix(".tar.gz"))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    if project != REPO:
        assert inside == {f"{project.name}/{file}" for file in files(project) - ABOUT}
    assert len(inside) == len(files(trees[1]) - ABOUT)
    assert {f"{name.partition('/')[0]}/py.typed" for name in inside} < inside
    assert (trees[1] / "LICENSE").read_bytes() == (REPO / "LICENSE").read_bytes()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    with zipfile.ZipFile(wheels[0]) as archive:
        (about,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert Metadata.from_email(about).description  # what an index shows


def files(folder: Path) -> set[str]:
    """The files of a folder, but compiled ones."""
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)) for path in found}


@pytest.mark.parametrize("path", sorted(REPO.glob("plugins/forge_*/pyproject.toml")), ids=lambda path: path.parent.name)
def test_the_table_of_packages_names_what_each_offers(path: Path) -> None:
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    told = tomllib.loads((REPO / "forge" / "packages.toml").read_text(encoding="utf-8")).get(project["name"], {})
    for kind in {*TOLD, *told}:
        assert set(told.get(kind, [])) == project["entry-points"].get(GROUPS[kind], {}).keys(), kind
