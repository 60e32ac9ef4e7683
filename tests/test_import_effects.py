"""Importing forge changes nothing of Python or torch: whatever is imported, before torch or after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

FOLDERS = [REPO / "forge", *sorted((REPO / "plugins").glob("forge_*")), *sorted((REPO / "recipes").glob("forge_*"))]


def modules() -> list[str]:
    """Every module of every package of ours, by its dotted name."""
    names = []
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def fingerprint(way: str, folder: Path, given: str = "") -> str:
    command = [sys.executable, "-m", "tests.support.process_fingerprint", way, *modules()]
    paths = os.pathsep.join([str(REPO), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=folder, env=environment, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("imports")
    report = fingerprint("first", folder)
    found = json.loads(fingerprint("after", folder, report))
    return json.loads(fingerprint("each", folder, report)) if found["after torch"] else found


@pytest.mark.parametrize("when", ["before torch", "after torch"])
def test_importing_every_module_changes_nothing(when: str, changes: dict[str, list[str]]) -> None:
    assert len(modules()) > 300
    assert changes[when] == []
