"""Each recipe trains and validates from the command line, in small; other verbs see what its fit sees."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge
from forge.cli import main
from tests.support import kernel_kit  # noqa: F401 - mends Triton's interpreter, in which kernels run here
from tests.support.profiles import some

POLICY = ["data.environments=2", "data.batch_size=8"]
GPT = ["layers=1", "width=16", "heads=2", "context=16", "vocabulary=50"]
SMALL = {
    "regression": [],
    "mlp": ["task.hidden=8", "data.samples=400"],
    "ppo": [*POLICY, "task.steps=8", "data.epochs=2", "data.episodes=2"],
    "gan_digits": [],
    "multilabel": ["data.train=200", "data.val=50"],
    "sentiment": ["data.train=200", "data.val=50"],
    "dqn": [*POLICY, "task.steps=8", "data.every=4", "data.warmup=20"],
    "grpo": ["task.width=16", "data.group=2", "data.batch_size=50"],
    "resnet18": ["data.samples=20", "data.batch_size=4", "data.size=8", "-p", "no:checkpoint"],
    "gpt2_124m": [
        *(f"task.{one}" for one in GPT),
        *("data.window=16", "data.batch_size=2", "data.vocabulary=50", "trainer.validate_every=null"),
    ],
}
"""The recipes that need no download, with what makes them small."""


@pytest.mark.parametrize("name", some(SMALL, quick=3))
def test_each_recipe_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("ppo", "dqn"):
        pytest.importorskip("gymnasium")
    assert forge.recipe(name).description
    words = ["trainer.device=cpu", "trainer.max_updates=2", "trainer.validate_every=2 updates", "-p", "no:tensorboard"]
    compiled = ["-p", "no:compile"] if "compile" in forge.recipe(name).plugins else []
    code = main(["fit", name, *words, *SMALL[name], *compiled])
    printed, errors = capsys.readouterr()
    assert code == 0, errors
    assert ("train/" if name == "gpt2_124m" else "val/") in printed  # which has a million tokens to validate on


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
