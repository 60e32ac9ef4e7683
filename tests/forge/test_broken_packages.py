"""A package with broken entry points breaks only what uses it, and is named in one line."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from forge import registry
from forge.cli import main
from forge.registry import GROUPS
from tests.support import limited
from tests.support.profiles import some

VALUES = {
    "no module": "no_such_module:Their",
    "no name": "theirs:no_such_name",
    "colons": "theirs:::Their",
    "empty": "",
    "spaces": "their s : Their ]",
    "exits": "their_exit:Their",
    "raises": "their_error:Their",
    "is not Python": "their_syntax:Their",
    "a number": "theirs:number",
    "a dot too many": ".theirs:Their",
    "itself": "theirs.theirs.theirs:Their",
}
MODULES = {
    "theirs.py": "number = 5\n",
    "their_exit.py": "raise SystemExit(7)\n",
    "their_error.py": "raise RuntimeError('a\\nb')\n",
    "their_syntax.py": "def (\n",
}


def package(folder: Path, entries: str) -> Path:
    info = folder / "their_package-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entries)
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    return folder


USES = (["plan", "quickstart", "-p", "theirs"], ["plan", "quickstart", "task.name=theirs"], ["theirs"])
OTHERS = (["plan", "quickstart"], ["plugins"], ["--help"])


@pytest.mark.parametrize("value", some(VALUES, 3))
def test_a_broken_entry_is_one_line_where_it_is_used(value: str, tmp_path: Path) -> None:
    groups = [GROUPS[kind] for kind in ("plugin", "task", "command")]
    folder = package(tmp_path, "".join(f"[{group}]\ntheirs = {VALUES[value]}\n" for group in groups))
    done = limited.call(partial(_run_all, folder))
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stderr.split()).count("their-package 1.2") == len(USES)
    assert "no_such_module" in done.stderr or value != "no module", "the cause is named"
    assert "Traceback" not in done.stderr


def _run_all(folder: Path) -> int:
    sys.path.insert(0, str(folder))
    registry.installed.cache_clear()
    return int([main(words) for words in (*USES, *OTHERS)] != [2] * len(USES) + [0] * len(OTHERS))


@pytest.mark.parametrize("text", ["no section\n", "[forge.plugins]\nno value\n", "\x00", "[forge.plugins\n= \n"])
def test_a_list_that_cannot_be_read_is_left_out_with_a_line(text: str, tmp_path: Path) -> None:
    paths = [package(tmp_path, text)]
    done = limited.forge("plan", "quickstart", paths=paths)
    assert done.returncode == 0, done.stderr
    if "no value" in text:
        assert done.stderr.count("their-package") == 1
    assert "Traceback" not in done.stderr
