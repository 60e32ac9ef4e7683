"""The core alone: with only forge, forge_plugins and forge_recipes, and what they depend on, all of it works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import core_alone

ENVIRONMENT = {
    **{"HOME": "/tmp", "PATH": "/usr/bin:/bin", "TERM": "dumb", "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
    "FORGE_REHEARSE": "off",  # the run is killed and goes on here
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment in which the core stands alone."""
    return core_alone.make(tmp_path_factory.mktemp("alone") / "env")


def run(alone: Path, folder: Path, *words: str, code: int = 0, command: str = "forge") -> str:
    done = subprocess.run([alone / command, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_no_package_around_the_core_can_be_imported(alone: Path, tmp_path: Path) -> None:
    others = sorted(p.parent.name for p in (core_alone.REPO / "plugins").glob("forge_*/pyproject.toml"))
    assert len(others) >= 7
    code = (
        f"from importlib.util import find_spec; print([n for n in {[*others, 'lightning', 'optuna']} if find_spec(n)])"
    )
    assert run(alone, tmp_path, "-c", code, command="python").strip() == "[]"


LIVES = """
import os, signal, sys, time
from pathlib import Path
import torch._dynamo
from forge.cli import fit, main
words = ["fit", "quickstart", "--run-dir", "r"]
child = os.fork()
if child == 0:
    os._exit(main([*words, "trainer.max_epochs=1000", "checkpoint.every=2 updates"]))
while not list(Path("r").glob("checkpoints/update-*")):
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it was killed"
    time.sleep(0.02)
os.kill(child, signal.SIGKILL)
assert os.waitpid(child, 0)[1] == signal.SIGKILL
sys.exit(main([*words, "trainer.max_updates=40", "--resume"]) or main(["report", "r", "-o", "page.html"]))
"""
"""A run is killed, a second one goes on, and is reported: in one process and its fork, which import torch once."""


def test_quickstart_trains_is_killed_goes_on_and_is_reported(alone: Path, tmp_path: Path) -> None:
    run(alone, tmp_path, "-c", LIVES, command="python")
    assert (tmp_path / "r" / "weights.safetensors").is_file()
    assert "val/accuracy" in (tmp_path / "page.html").read_text()


def test_plugins_are_listed_without_those_of_packages(alone: Path, tmp_path: Path) -> None:
    listed = run(alone, tmp_path, "plugins")
    assert "clip" in listed
    assert "pipeline" not in listed
    assert "doctor" not in run(alone, tmp_path, "--help")


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["doctor", "quickstart"], "forge-doctor"),
        (["tune", "speed", "quickstart"], "forge-speed"),
        (["plan", "quickstart", "--cluster", "h100x2"], "forge-cluster"),
        (["fit", "quickstart", "-p", "pipeline"], "forge-cluster"),
    ],
)
def test_what_is_missing_is_answered_with_what_to_install(
    alone: Path, tmp_path: Path, words: list[str], package: str
) -> None:
    told = run(alone, tmp_path, *words, code=2)
    assert f"pip install {package}" in told
    assert len(told.strip().splitlines()) == 1


def test_a_missing_public_name_is_answered_too(alone: Path, tmp_path: Path) -> None:
    told = run(alone, tmp_path, "-c", "import forge; forge.export", command="python", code=1)
    assert told.strip().splitlines()[-1].endswith("pip install forge-ship.")


@pytest.mark.slow
def test_the_cores_own_tests_pass(alone: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/forge", "tests/forge_plugins"]
    run(alone, core_alone.REPO, *words, command="python")
