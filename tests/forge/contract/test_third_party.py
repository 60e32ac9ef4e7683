"""A plugin package that forge does not know: installed by pip, found by its entry point, run in a recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import REPO, Run
from tests.support import forked

EXAMPLE = REPO / "plugins" / "example-lookahead"
PORTED = REPO / "plugins" / "example-image-sampler"


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example package was installed into."""
    return install(EXAMPLE, tmp_path_factory.mktemp("example"))


def install(source: Path, target: Path) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_an_installed_plugin_is_listed_documented_and_checked_like_a_built_in(example: Path, run_forge: Run) -> None:
    (line,) = [line for line in run_forge("plugins", paths=[example]).stdout.splitlines() if "lookahead" in line]
    assert "forge-example-lookahead" in line
    told = run_forge("plugins", "lookahead", paths=[example]).stdout
    for words in ("Keep slow weights that follow", "Share of the way that the slow weights move", "forge_step_end"):
        assert words in told
    done = run_forge("fit", "digits_lookahead", "lookahead.alfa=0.1", paths=[example])
    assert (done.returncode, "Did you mean 'alpha'?" in done.stderr) == (2, True)


def test_its_recipe_trains(example: Path, run_forge: Run, empty_folder: Path) -> None:
    done = run_forge("fit", "digits_lookahead", "trainer.max_epochs=2", "lookahead.every=3", paths=[example])
    assert done.returncode == 0, done.stderr
    (run,) = empty_folder.glob("runs/digits_lookahead/*")
    stack = json.loads((run / "card.json").read_text())["stack"]
    (plugin,) = (plugin for plugin in stack if plugin["name"] == "lookahead")
    assert (plugin["class"], plugin["options"]) == ("Lookahead", {"every": 3, "alpha": 0.5})
    assert "lookahead/distance" in (run / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("source", [EXAMPLE, PORTED], ids=lambda source: source.name)
def test_its_own_tests_pass(source: Path) -> None:
    done = forked.call(partial(run_tests, source))
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def run_tests(source: Path) -> int:
    sys.path.insert(0, str(source / "src"))
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(source), "-c", str(source / "pyproject.toml")]
    return pytest.main([*options, str(source / "tests")])


@pytest.mark.slow
@pytest.mark.parametrize("source", [EXAMPLE, PORTED], ids=lambda source: source.name)
def test_its_conformance_is_the_one_that_is_listed(source: Path, run_forge: Run, tmp_path: Path) -> None:
    name = f"forge-{source.name}"
    target = install(source, tmp_path / "site")
    done = run_forge("plugins", "check", name, "--out", str(tmp_path), paths=[target])
    assert done.returncode == 0, done.stdout + done.stderr
    now = json.loads((tmp_path / "conformance.json").read_text())
    then = json.loads((REPO / "docs" / "conformance" / f"{name}.json").read_text())
    assert {plugin: found["checked"] for plugin, found in now["plugins"].items()} == {
        plugin: found["checked"] for plugin, found in then["plugins"].items()
    }
