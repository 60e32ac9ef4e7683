"""What a contributor meets: workflows and hooks run targets that exist, and files about the project agree with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPO

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE))
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def targets_of(workflow: Path) -> set[str]:
    """The make targets that the steps of a workflow run, those of a `matrix.target` too."""
    found: set[str] = set()
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        words = {target for step in job["steps"] for target in re.findall(r"make (\S+.*)", step.get("run", ""))}
        chosen = job.get("strategy", {}).get("matrix", {}).get("target", [])
        found |= set(chosen) if "${{ matrix.target }}" in words else words
    return found


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_that_there_are(workflow: Path) -> None:
    assert targets_of(workflow) <= TARGETS


def test_every_change_runs_what_contributors_are_asked_to_run() -> None:
    (asked,) = re.findall(r"^(`make .*) pass;", (REPO / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert targets_of(REPO / ".github/workflows/tests.yml") == set(re.findall(r"`make ([a-z-]+)`", asked))


def test_hooks_before_a_commit_run_the_tools_of_make_check() -> None:
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (REPO / "Makefile").read_text(), flags=re.MULTILINE)
    checked = re.findall(r"@\$\(BIN\)/(.*)", recipe.replace(" --check", ""))
    (local,) = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]] == checked


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])


def test_every_package_has_the_version_of_the_core() -> None:
    for path in (REPO / "plugins").glob("forge_*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        assert project["version"] == PROJECT["version"], path
        assert f"forge-trainer=={PROJECT['version']}" in project["dependencies"], path
