"""`forge tune speed`: the recipe that it writes, and the options of other searches that it refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from forge.cli import main
from forge.config import read_recipe
from forge.tuning import Change, step_timer
from forge_speed.commands import tune_speed
from tests.forge.cli.test_tune import TASK


@pytest.fixture
def file(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task, for which times do not matter."""
    for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
        monkeypatch.setattr(step_timer, name, value)
    path = Path(f"task_{empty_folder.name}.py")  # modules are kept by their name
    path.write_text(TASK)
    return f"{path}:Task"


def test_it_writes_a_recipe_that_fit_takes(capsys: pytest.CaptureFixture[str], file: str) -> None:
    given = [file, "data.batch_size=8", "task.lr=0.01", "trainer.device=cpu", "--without", "compile"]
    assert main(["tune", "speed", *given]) == 0
    out = capsys.readouterr().out
    assert [str(path) for path in Path("runs").rglob("*.*")] == ["runs/tune/Task-speed.yaml"]
    for lever in ("fused_optimizer", "micro-batch 4"):
        assert lever in out
    config = yaml.safe_load(Path("runs/tune/Task-speed.yaml").read_text())
    assert config["task"] == {"lr": 0.01}
    assert config["trainer"] == {"device": "cpu"}
    assert config["data"]["batch_size"] in (4, 8)
    command = shlex.split(next(line for line in out.splitlines() if line.startswith("use it")).removeprefix("use it"))
    assert command[1:] == ["fit", file, "--recipe", "runs/tune/Task-speed.yaml"]
    assert main([*command[1:], "-q", "trainer.max_epochs=1", "--run-dir", "runs/one"]) == 0
    assert Path("runs/one/weights.safetensors").is_file()


def test_the_answer_changes_a_recipe_by_name() -> None:
    change = Change({"remat": None, "compile": {"dynamic": None}}, {"batch_size": 4})
    changed = tune_speed.changed_recipe(read_recipe("frugal").checked(), change)
    assert "remat" not in changed.plugins
    assert changed.plugins["compile"] == {"dynamic": None}
    assert changed.config["data"] == {"batch_size": 4}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["lr", "--bitwise"], "forge tune has no option '--bitwise'"),
        (["speed", "--updates", "3"], "forge tune speed has no option '--updates'"),
        (["speed", "--out", "x.png"], ".yaml"),
    ],
)
def test_options_of_another_search_are_refused(
    capsys: pytest.CaptureFixture[str], file: str, words: list[str], named: str
) -> None:
    assert main(["tune", words[0], file, *words[1:]]) == 2
    assert named in capsys.readouterr().err
