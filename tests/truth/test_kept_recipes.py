"""A run of each recipe, cut halfway by an earlier forge, goes on and ends as it would have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.truth import kept_recipes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_recipes.write_data(tmp_path_factory.mktemp("kept") / "data")


@pytest.mark.parametrize("recipe", kept_recipes.RECIPES)
def test_a_kept_run_of_a_recipe_goes_on_and_ends_as_if_it_had_not_been_cut(
    recipe: str, data: Path, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in kept_recipes.NEEDS.get(recipe, ()):
        pytest.importorskip(package)
    monkeypatch.setenv("FORGE_DATA", str(data))
    kept, run = kept_recipes.FOLDER / recipe, empty_folder / "run"
    shutil.copytree(kept / "run", run, symlinks=True)
    assert kept_recipes.fit(recipe, run, resume=True) == 0
    now, then = kept_recipes.ending(run), json.loads((kept / "ended.json").read_text(encoding="utf-8"))
    assert now["update"] == then["update"]
    assert now["weights"].keys() == then["weights"].keys()
    for name, numbers in then["weights"].items():
        assert all(map(kept_recipes.near, now["weights"][name], numbers)), name
