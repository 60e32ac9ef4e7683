"""The Trainer's settings are one dataclass, and every plugin is built once."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from typing import Any

import pytest

import forge
from forge.config import read_recipe
from forge.config.trainer_defaults import GivenSettings, Settings
from forge.contract.plugin import Plugin


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each plugin class was built."""
    counts: Counter[str] = Counter()
    init = Plugin.__init__

    def counted(self: Plugin, *first: Any, **values: Any) -> None:
        counts[type(self).__name__] += 1
        init(self, *first, **values)

    monkeypatch.setattr(Plugin, "__init__", counted)
    return counts


def fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Settings)]


def test_the_trainer_takes_every_setting_by_name() -> None:
    assert [*inspect.signature(forge.Trainer).parameters] == [*fields(), "recipe", "plugins"]
    assert [*GivenSettings.__annotations__] == fields()


def test_the_trainers_defaults_are_those_of_the_settings() -> None:
    parameters = inspect.signature(forge.Trainer).parameters
    assert Settings(**{name: parameters[name].default for name in fields()}) == Settings()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": "default"},
        {"recipe": "default", "plugins": {"clip": {"max_norm": 0.5}}},
        {"recipe": "default", "plugins": {"checkpoint": {"keep": 1}}},
        {"recipe": "default", "plugins": ["clip", "checkpoint"]},
        {"plugins": ["clip", "ema"]},
    ],
)
def test_a_plugin_is_built_once(built: Counter[str], options: dict[str, Any]) -> None:
    trainer = forge.Trainer(max_updates=1, **options)
    assert built == Counter(type(plugin).__name__ for plugin in trainer.stack)


def test_a_loaded_recipe_hands_its_plugins_to_the_first_trainer(built: Counter[str]) -> None:
    recipe = read_recipe("default", ["clip.max_norm=0.5"], add=["clip"]).checked()
    first = forge.Trainer(max_updates=1, recipe=recipe)
    assert set(built.values()) == {1}
    second = forge.Trainer(max_updates=1, recipe=recipe)
    assert first.stack["clip"] is not second.stack["clip"]
    assert repr(first.stack["clip"]) == repr(second.stack["clip"])
