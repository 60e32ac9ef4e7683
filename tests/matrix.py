"""Run tests with the oldest and the newest versions that forge allows, and between; write the table of docs/install.md.

    make matrix                                # every row
    make matrix ROWS="newest-onnx oldest*"     # some of them; the other rows of the table stay
    python tests/matrix.py --list              # their names

A row is an environment and tests. `oldest` has every requirement of the pyproject.toml files at its lower bound,
`newest` has none pinned. A row named after an environment alone runs the core's quick tests (`tests/forge`);
`ENVIRONMENT-PACKAGE` runs the tests that name that package. An environment is made by uv in an empty folder, and
removed before the next one: a PyTorch with CUDA takes 6 GB. uv finds the interpreter, or downloads it. It takes pip's
settings from the environment (PIP_INDEX_URL and those beside it), and its own, as UV_TORCH_BACKEND=cpu; pytest takes
PYTEST_ADDOPTS.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "install.md"
BEGIN, END = "<!-- matrix: written by `make matrix` -->\n", "<!-- matrix: end -->\n"
HEAD = "| row | Python | versions | passed | failed | skipped | date | machine |\n|---|---|---|---|---|---|---|---|\n"


class Environment(NamedTuple):
    """An interpreter, and what uv is told about versions."""

    python: str
    options: tuple[str, ...] = ()


ENVIRONMENTS = {
    "oldest": Environment("3.11", ("--resolution=lowest-direct",)),
    "torch-2.11": Environment("3.12", ("torch==2.11.*",)),
    "torch-2.13": Environment("3.13", ("torch==2.13.*",)),
    "newest": Environment("3.14"),
}
PACKAGES = ("torchvision", "transformers", "lightning", "optuna", "onnx")
"""Packages of others that have rows of their own, in the oldest and in the newest environment."""

ROWS = {
    **{name: (name, "") for name in ENVIRONMENTS},
    **{f"{name}-{package}": (name, package) for name in ("oldest", "newest") for package in PACKAGES},
}
"""Name of a row → its environment and its package ("": the core)."""

EXTRAS = {"forge_ship": "[formats,serve]"}
"""Their versions count as ours do: uv takes lower bounds of what it is told to install, not of what that requires."""

SETTINGS = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
}
"""Settings of pip, and what uv calls them."""


def main() -> int:
    """Run the rows that were asked for, write each into the table as it ends, and return 1 if one is not green."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of rows, `*` in them too; without any, all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where environments are made")
    parser.add_argument("--list", action="store_true", help="list the names of rows, and run nothing")
    asked = parser.parse_args()
    chosen = {row for pattern in asked.rows for row in fnmatch.filter(ROWS, pattern)} if asked.rows else {*ROWS}
    if unknown := [pattern for pattern in asked.rows if not fnmatch.filter(ROWS, pattern)]:
        parser.error(f"there is no row {', '.join(unknown)}. Rows: {', '.join(ROWS)}")
    if asked.list:
        print(*ROWS, sep="\n")
        return 0
    green = True
    for name, environment in ENVIRONMENTS.items():
        rows = [row for row, (where, _) in ROWS.items() if where == name and row in chosen]
        if rows:
            with tempfile.TemporaryDirectory(prefix=f"forge-{name}-", dir=asked.folder) as folder:
                python = make(Path(folder), environment)
                for row in rows:
                    green &= run(row, python, Path(folder))
    return 0 if green else 1


def make(folder: Path, environment: Environment) -> Path:
    """Return the interpreter of a new environment that has forge, the packages around it and what the tests need."""
    settings = {"UV_CACHE_DIR": str(folder / "cache"), **os.environ}
    settings |= {ours: os.environ[theirs] for theirs, ours in SETTINGS.items() if theirs in os.environ}
    around = [project.parent for project in sorted(REPO.glob("plugins/forge_*/pyproject.toml"))]
    packages = [f"{REPO}[dev]", *(f"{package}{EXTRAS.get(package.name, '')}" for package in around)]
    python = folder / "bin" / "python"
    for words in (
        ["venv", "--quiet", "--seed", "--allow-existing", "--python", environment.python, folder],
        ["pip", "install", "--quiet", "--python", python, *environment.options]
        + [word for package in packages for word in ("--editable", package)],
    ):
        subprocess.run([sys.executable, "-m", "uv", *map(str, words)], env=settings, check=True)
    return python


def run(row: str, python: Path, folder: Path) -> bool:
    """Run the tests of a row, write it into the table, and return whether none failed."""
    _, package = ROWS[row]
    report = folder / f"{row}.xml"
    command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *tests_of(package)]
    subprocess.run(command, cwd=REPO, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    if not report.exists():
        raise SystemExit(f"{row}: pytest ended without a report; its message stands above")
    counts = ElementTree.parse(report).find("testsuite").attrib  # type: ignore[union-attr]
    failed, skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
    shown = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    cells = (row, *versions(python, package), int(counts["tests"]) - failed - skipped, failed, skipped)
    write(row, f"| {' | '.join(map(str, (*cells, datetime.date.today(), shown)))} |\n")
    return not failed


def tests_of(package: str) -> list[Path]:
    """Return the folder of the core's tests, or the files of tests that name a package."""
    tests = REPO / "tests"
    if not package:
        return [tests / "forge"]
    files = [file for folder in ("forge*", "recipes") for file in sorted(tests.glob(f"{folder}/**/test_*.py"))]
    named = re.compile(rf"\b{package}\b")
    return [file for file in files if not file.stem.endswith("_cuda") and named.search(file.read_text())]


def versions(python: Path, package: str) -> tuple[str, str]:
    """Return the versions of Python and of what a row is about."""
    names = ("torch", package or "torchvision")
    code = f"import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {names}))"
    found, *numbers = subprocess.check_output([python, "-c", code], text=True).split()
    return found, ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))


def write(row: str, line: str) -> None:
    """Put a line of the table in the place of the one that the row had; rows stand in the order of `ROWS`."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = {match[1]: match[0] for match in re.finditer(r"^\| (\S+) .*\n", table, flags=re.MULTILINE)} | {row: line}
    PAGE.write_text(before + BEGIN + HEAD + "".join(lines[name] for name in ROWS if name in lines) + END + after)
    print(line, end="")


if __name__ == "__main__":
    raise SystemExit(main())
