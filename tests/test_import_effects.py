"""Importing forge changes nothing of Python or torch: whatever is imported, before torch or after it."""

from __future__ import annotations

import ast
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


def of_others() -> list[str]:
    """What our modules import of others at their top."""
    names: dict[str, None] = {}
    for path in (path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name: None for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}{part}": None for part in ("", *(f".{alias.name}" for alias in node.names))}
    return [name for name in names if not name.startswith("forge")]


def test_importing_every_module_after_torch_changes_nothing(tmp_path: Path) -> None:
    assert len(modules()) > 300
    report = json.dumps({"others": of_others(), "fingerprint": {}})
    if json.loads(fingerprint("after", tmp_path, report))["after torch"]:
        assert json.loads(fingerprint("each", tmp_path, report))["after torch"] == []


@pytest.mark.slow
def test_importing_every_module_before_torch_changes_nothing(tmp_path: Path) -> None:
    report = fingerprint("first", tmp_path)
    assert json.loads(fingerprint("after", tmp_path, report))["before torch"] == []
