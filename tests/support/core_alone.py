"""An environment in which the core stands alone: forge, its plugins and recipes, and what those depend on.

    python -m tests.support.core_alone FOLDER

makes one; FOLDER/bin/forge and FOLDER/bin/python are its commands. Nothing is downloaded: packages are links to those
installed here. `TOOLS` are there too, for the core's own tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
OURS = {"forge": REPO, "forge_plugins": REPO / "plugins", "forge_recipes": REPO / "recipes"}
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "packaging", "pip", "hatchling")


def make(folder: Path) -> Path:
    """Make the environment in a folder, and return its `bin`."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for found in closure([*project["dependencies"], *TOOLS]).values():
        link(found, packages)
    for name, home in OURS.items():
        (packages / name).symlink_to(home / name)
    write_metadata(project, packages)
    command = folder / "bin" / "forge"
    command.write_text(f"#!{folder}/bin/python\nimport sys\nfrom forge.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    return folder / "bin"


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """Return the installed distributions that these requirements need, each with what it needs in turn."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in found or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = distribution(wanted.name)
        except PackageNotFoundError:  # as packages for other systems
            continue
        waiting += [Requirement(text) for text in found[name].requires or ()]
    return found


def link(found: Distribution, packages: Path) -> None:
    """Link the files of a distribution by their topmost folders."""
    home = Path(str(found.locate_file("")))
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if (home / top).exists() and not (packages / top).exists():
            (packages / top).symlink_to(home / top)
    if not found.files and (folder := getattr(found, "_path", None)) is not None:
        (packages / folder.name).symlink_to(folder)


def write_metadata(project: dict, packages: Path) -> None:
    info = packages / f"forge_trainer-{project['version']}.dist-info"
    info.mkdir()
    head = [f"Name: {project['name']}", f"Version: {project['version']}"]
    needs = [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", *head, *needs]) + "\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([make(place.absolute()) / "forge", "--version"], check=True)
