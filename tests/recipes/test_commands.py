"""Recipes train and validate from the command line, in small; other verbs see what their fit sees."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge
from forge.cli import main
from tests.support import kernel_kit  # noqa: F401 - mends Triton's interpreter, in which kernels run here
from tests.support.profiles import some

POLICY = ["data.environments=2", "data.batch_size=8"]
SMALL = {
    "ppo": [*POLICY, "task.steps=8", "data.epochs=2", "data.episodes=2"],
    "dqn": [*POLICY, "task.steps=8", "data.every=4", "data.warmup=20"],
    "resnet18": ["data.samples=20", "data.batch_size=4", "data.size=8", "-p", "no:checkpoint"],
}
"""Recipes, with what makes them small."""


@pytest.mark.parametrize("name", some(SMALL, quick=1))
def test_a_recipe_validates_from_the_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/truth/test_kept_recipes.py trains all but resnet18 and finetune."""
    if name in ("ppo", "dqn"):
        pytest.importorskip("gymnasium")
    assert forge.recipe(name).description
    words = ["trainer.device=cpu", "trainer.max_updates=2", "trainer.validate_every=2 updates", "-p", "no:tensorboard"]
    compiled = ["-p", "no:compile"] if "compile" in forge.recipe(name).plugins else []
    code = main(["fit", name, *words, *SMALL[name], *compiled])
    printed, errors = capsys.readouterr()
    assert code == 0, errors
    assert "val/" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    some([["data"], ["plan", "--memory", "1"], ["tune", "lr", "--updates", "10"], ["doctor", "--quick"]], quick=2),
)
def test_other_verbs_see_what_the_fit_sees(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    verb = words[: 2 if words[0] == "tune" else 1]
    code = main([*verb, "ppo", *words[len(verb) :], *SMALL["ppo"], "trainer.max_updates=12"])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_the_road_before_a_long_run_sees_no_mistake(
    name: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evidence of the road is that of the fit: what repeats by design is no mistake, and a resume is exact."""
    pytest.importorskip("gymnasium")
    words = [*SMALL[name], "trainer.max_updates=60", "trainer.validate_every=30 updates"]
    code = main(["ready", name, *words, "--budget", "60"])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors
    for wrong in ("not restored", "duplicates", "tensor_ignored", "average_stands_still", "is not learnt"):
        assert wrong not in printed, printed
