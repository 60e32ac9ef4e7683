"""The commit that a run began with is on its card, wherever in the repository it began."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from forge.runs.card import git_state

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    return subprocess.run(["git", *me, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_commit_branch_and_changes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "file").write_text("one")
    git(tmp_path, "init", "--quiet", "--initial-branch=mine")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message=first")
    known = {"commit": git(tmp_path, "rev-parse", "HEAD"), "branch": "mine", "dirty": False}
    assert git_state(tmp_path / "deep" / "down") == known
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {**known, "dirty": True}
    monkeypatch.chdir(tmp_path / "deep")
    assert git_state(Path()) == {**known, "dirty": True}
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert git_state(Path("/")) == {**known, "dirty": True}


def test_outside_a_repository_and_without_commits_there_is_none(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) is None
