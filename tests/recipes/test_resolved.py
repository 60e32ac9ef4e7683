"""Every recipe resolves to what is recorded in resolved.json, defaults included.

    python -m tests.recipes.test_resolved    # record anew; git diff shows which values changed

A section or plugin that is the same in the recipe `default` is recorded as "as default".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge import registry
from forge.config import list_recipes, read_recipe

RECORD = Path(__file__).with_name("resolved.json")
SAME = "as default"
OWN = {name for name, file in list_recipes().items() if file.package.startswith("forge-trainer")}
Parts = dict[str, Any]


def resolved(name: str) -> Parts:
    """The sections and plugins of a recipe, in order, with every default."""
    values = read_recipe(name).checked().resolved
    plugins = {f"plugins.{key}": options for key, options in values.get("plugins", {}).items()}
    return {key: values[key] for key in ("task", "data", "trainer") if key in values} | plugins


def recorded() -> dict[str, Parts]:
    stored: dict[str, Parts] = json.loads(RECORD.read_text())
    return {
        name: {key: stored["default"][key] if part == SAME else part for key, part in parts.items()}
        for name, parts in stored.items()
    }


def record() -> None:
    """Write resolved.json: a line for each section and plugin of each recipe."""
    default = resolved("default")
    blocks: list[str] = []
    for name in sorted(OWN):
        parts = resolved(name)
        shown = {key: SAME if name != "default" and default.get(key) == part else part for key, part in parts.items()}
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(part)}" for key, part in shown.items())
        blocks.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    RECORD.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def test_every_recipe_is_recorded() -> None:
    assert recorded().keys() == OWN


@pytest.mark.skipif("first_look" not in registry.installed("plugin"), reason="recorded with every package installed")
@pytest.mark.parametrize("name", sorted(OWN))
def test_a_recipe_resolves_to_what_is_recorded(name: str) -> None:
    now, then = resolved(name), recorded()[name]
    assert list(now) == list(then), "the stack, in order"
    assert {key: part for key, part in now.items() if part != then[key]} == {}, "python -m tests.recipes.test_resolved"


if __name__ == "__main__":
    record()
