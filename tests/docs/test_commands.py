"""The commands on every page work: forge's are run, of others it is looked at whether what they name is there."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import tomllib
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import forge
from forge import cli
from tests.conftest import PROFILE, REPO
from tests.support.docs_pages import Command, blocks, commands, with_blocks

NOT_RUN = {
    "serve": "serves until it is stopped; tests/forge_ship/test_serving_process.py starts it",
    "gpt2_124m": "124 million parameters, made for a GPU",
    "resnet18": "made for a GPU",
    "mlp": "made for a GPU",
    "shakespeare_char": "ten million parameters, made for a GPU",
}
"""Verbs and recipes that are not run here, and why: their options are parsed, and their recipe is loaded."""
QUICK = ("docs/start.md", "docs/install.md")
"""Pages whose commands the quick profile runs: of those of all others it looks at the options."""
LONG = {
    "tune": "tests/forge/cli/test_tune.py searches in small",
    "--devices": "tests/forge/planning/test_planning.py plans",
}
"""What is run in the full profile only, and what stands for it in the quick one."""


@pytest.mark.parametrize("page", with_blocks("bash"))
def test_the_options_on_a_page_are_known(page: str) -> None:
    for command in commands(page):
        if command.words[0] == "forge" and not command.words[1].startswith("-"):
            parsed(command)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK)) for page in with_blocks("bash")]
)
def test_the_commands_on_a_page_work(
    page: str, empty_folder: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    write_files(page, empty_folder)
    for command in commands(page):
        with monkeypatch.context() as patch:
            for name, value in command.env.items():
                patch.setenv(name, value)
            if is_script_of_page(command, empty_folder):
                patch.setattr("sys.argv", command.words[1:])
                runpy.run_path(command.words[1], run_name="__main__")
            elif command.words[0] != "forge":
                check(command, empty_folder)
            elif is_run(command):
                assert cli.main(cheap(command.words[1:])) == 0, command.place
            else:
                parse(command)


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_the_recipes_on_a_page_load(page: str, empty_folder: Path, small_data: Path) -> None:
    for path in write_files(page, empty_folder):
        if path.suffix == ".yaml":
            trainer = forge.Trainer(recipe=path)
            assert "task" not in forge.recipe(path) or trainer.build() is not None


def write_files(page: str, folder: Path) -> list[Path]:
    """Every YAML block, and every Python block that begins with a file's name, as that file."""
    paths = []
    for language in ("yaml", "python"):
        for block in blocks(page, language):
            name = re.match(r"# ([\w./-]+\.(?:yaml|py))\n", block.text)
            assert name or language != "yaml", f"{page}:{block.line}: say in the first line what the file is called"
            if name:
                path = folder / name[1]
                path.write_text(block.text)
                paths.append(path)
    return paths


def is_script_of_page(command: Command, folder: Path) -> bool:
    """`python FILE.py`, a file that the page shows."""
    return command.words[0] == "python" and (folder / command.words[1]).is_file()


def is_run(command: Command) -> bool:
    words = command.words[1:]
    if any(word in NOT_RUN for word in words[:3]):
        return False
    return PROFILE == "full" or not LONG.keys() & set(words)


def cheap(words: list[str]) -> list[str]:
    """A few updates of a fit, and a validation; `first_look`, which takes as long, has tests of its own."""
    if words[0] != "fit":
        return words
    most, others = (3, []) if PROFILE == "full" else (2, ["-p", "no:first_look"])
    return [*words, *others, f"trainer.max_updates={most}", f"trainer.validate_every={most} updates"]


def parse(command: Command) -> None:
    """A command's options are known to its verb, and its recipe can be loaded."""
    from forge.cli import target

    args = parsed(command)
    if hasattr(args, "overrides"):
        target.load(args)


def parsed(command: Command) -> Namespace:
    verb, rest = cli.command_of(command.words[1:])
    assert verb.split()[0] in cli.verbs(), command.place
    try:
        return cli.module_of(verb).parser().parse_intermixed_args(rest)
    except SystemExit:
        pytest.fail(command.place)


# ---------------------------------------------------------------------------------------------------------------------
# Commands that are not forge's


def check(command: Command, folder: Path) -> None:
    name, *words = command.words
    known = CHECKS.get(name)
    assert known, f"{command.place}\nis no command that this test can check: write it as ```text, or add it to CHECKS"
    assert known(words, folder), f"{command.place}\nnames something that is not there"


def is_target(words: list[str], folder: Path) -> bool:
    """make TARGET [VARIABLE=value]"""
    targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE)
    return {word for word in words if "=" not in word} <= set(targets)


def is_module(words: list[str], folder: Path) -> bool:
    """python -m MODULE ..., or python FILE ..."""
    if words[0] == "-m":
        return is_importable(words[1])
    return is_file(words[:1], folder)


def is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_installable(words: list[str], folder: Path) -> bool:
    """pip install [-e] DIRECTORY[extras], or what pyproject.toml names"""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [project["name"], *project["dependencies"], *(name for names in extras.values() for name in names)]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in listed}  # pyright: ignore[reportOptionalSubscript]
    for word in words[1:]:
        what, _, wanted = word.rstrip("]").partition("[")
        there = what in names or (folder / what).is_dir() or word.startswith("-")
        if not there or not set(filter(None, wanted.split(","))) <= extras.keys():
            return False
    return words[0] == "install"


def is_file(words: list[str], folder: Path) -> bool:
    return all((folder / word).exists() or (REPO / word).exists() for word in words if not word.startswith("-"))


def is_script(name: str) -> Callable[[list[str], Path], bool]:
    """A program that an installed package brings."""
    there = bool(entry_points(group="console_scripts", name=name)) or shutil.which(name) is not None
    return lambda words, folder: there


CHECKS: dict[str, Callable[[list[str], Path], bool]] = {
    "make": is_target,
    "python": is_module,
    "pip": is_installable,
    "pytest": is_file,
    "cd": is_file,
    "ls": lambda words, folder: True,
    "source": lambda words, folder: words == [".venv/bin/activate"],
    "torchrun": is_script("torchrun"),
    "tensorboard": is_script("tensorboard"),
}
