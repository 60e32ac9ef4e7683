"""In Python a recipe is a DictConfig, the user's own code: OmegaConf merges it, and the Trainer takes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

import forge
import forge_plugins
from forge.config import Recipe
from forge.errors import RecipeError
from forge.testing import TinyTask, tiny_batches

EVERY = {"trainer": {"log_every": 7}}


def merged(changes: dict[str, Any], name: str = "default") -> Any:
    return OmegaConf.merge(forge.recipe(name), changes)


def test_a_recipe_is_a_dictconfig_that_keeps_its_references() -> None:
    recipe = forge.recipe("fashion_cnn", ["trainer.seed=7"], add=["clip"], remove=["tensorboard"], stack="frugal")
    assert isinstance(recipe, DictConfig)
    assert (recipe.trainer.seed, recipe.plugins.clip) == (7, {})
    assert "tensorboard" not in recipe.plugins
    assert "remat" in recipe.plugins
    assert OmegaConf.merge(recipe, {"trainer": {"device": "cpu"}}).data.device == "cpu"


def test_the_trainer_takes_one_whose_values_come_from_python(tmp_path: Path) -> None:
    changes = {"trainer": {"max_updates": 2, "seed": 9}, "plugins": {"clip": {"max_norm": 0.5}, "tensorboard": None}}
    trainer = forge.Trainer(recipe=merged(changes), run_dir=tmp_path / "run")
    assert trainer.max_updates == 2
    assert trainer.stack["clip"].config == forge_plugins.Clip(0.5).config
    assert "tensorboard" not in trainer.stack
    assert isinstance(trainer.recipe, Recipe)
    assert trainer.recipe.origin["plugins.clip.max_norm"] == "Python"
    assert trainer.recipe.origin["trainer.log_every"] == "default"
    trainer.fit(TinyTask(), tiny_batches())
    assert forge.recipe(tmp_path / "run" / "config.yaml").trainer == {"max_updates": 2, "seed": 9}


@pytest.mark.parametrize("given", [Path("mine.yaml"), EVERY, OmegaConf.create(EVERY)])
def test_a_file_and_a_mapping_are_taken_too(given: Any, empty_folder: Path) -> None:
    Path("mine.yaml").write_text("trainer: {log_every: 7}")
    assert forge.Trainer(recipe=given).log_every == 7


def test_a_part_of_a_larger_configuration_may_refer_to_the_rest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_TEST_EVERY", "11")
    part = {"trainer": {"log_every": "${every}"}}
    whole = OmegaConf.create({"every": "${oc.decode:${oc.env:FORGE_TEST_EVERY}}", "forge": part})
    assert forge.Trainer(recipe=whole.forge).log_every == 11


def test_the_task_and_the_data_of_a_recipe_are_built_after_its_seed() -> None:
    def weights() -> list[float]:
        recipe = merged({"task": {"hidden": 8}, "data": {"batch_size": 100}}, "quickstart")
        task, data = forge.Trainer(recipe=recipe, run_dir=False).build()
        assert data.train is not None
        assert len(next(iter(data.train))[0]) == 100
        return [float(each.detach().sum()) for each in task.parameters()]

    assert weights() == weights()
    with pytest.raises(RecipeError, match="no recipe"):
        forge.Trainer(plugins=[]).build()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plugins": {"clip": {"max_nrom": 1}}}, r"plugins.clip.max_nrom \(Python\).*'max_norm'"),
        ({"plugin": {}}, "Python: a recipe has no key 'plugin'.*'plugins'"),
        ({"trainer": {"max_epochs": "${trainer.nope}"}}, r"trainer.max_epochs \(Python\).*nope"),
        ({"trainer": {"max_epochs": "???"}}, r"trainer.max_epochs \(Python\)"),
        ({"extends": ["default"]}, r"extends \(Python\).*forge.recipe"),
        ({"task": {"sizes": list(range(3000))}}, "The recipe given in Python:.*keys and values"),
        ([], "recipe="),
    ],
)
def test_what_is_wrong_is_said_with_its_key(given: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        forge.Trainer(recipe=OmegaConf.create(given))  # pyright: ignore[reportArgumentType]


def test_a_file_is_checked_where_its_lines_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_TEST_TOKEN", "cpu")
    file = tmp_path / "a.yaml"
    for text in (
        "trainer:\n  device: ${oc.env:FORGE_TEST_TOKEN}",
        "trainer:\n  run_dir: /tmp",
        "plugins:\n  clip: {x: 1}",
    ):
        file.write_text(text)
        with pytest.raises(RecipeError, match=r"a\.yaml:2"):
            forge.recipe(file)


def test_forge_is_imported_without_omegaconf_and_yaml() -> None:
    code = "import sys, json, forge; print(json.dumps(sorted({'omegaconf', 'yaml', 'antlr4'} & sys.modules.keys())))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert json.loads(told) == []
