"""Who may import whom. `python -m tests.house` prints it."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from tests import house

edges = cache(house.graph)
CLASS = re.compile(r"^ *class (\w+)[(:\[]", re.MULTILINE)


def test_no_room_imports_one_beside_or_above() -> None:
    assert house.beside_or_above(edges()) == []


def test_every_file_is_in_a_room_with_a_level() -> None:
    assert {house.room_of(module) for module in house.MODULES} <= house.LEVEL.keys()


def test_no_circle_of_files_crosses_rooms() -> None:
    circles = house.circles(edges())
    assert [circle for circle in circles if len({house.room_of(module) for module in circle}) > 1] == []
    assert all(house.room_of(circle[0]) == "contract" for circle in circles if len(circle) > 2)


def test_a_class_name_appears_once() -> None:
    """Every plugin has a nested Config; all other names are used once in the tree, recipes included."""
    files = [*house.MODULES.values(), *(house.REPO / "recipes").rglob("*.py")]
    names = Counter(name for path in files for name in CLASS.findall(path.read_text()) if name != "Config")
    assert names["TaskModule"] == 1
    assert [name for name, count in names.items() if count > 1] == []


def test_a_circle_and_a_forbidden_import_are_found() -> None:
    wrong = {"forge.data.a": {"forge.data.b"}, "forge.data.b": {"forge.data.a"}, "forge.errors": {"forge.engine.x"}}
    wrong |= {"forge.engine.x": {"forge.errors"}}
    assert house.circles(wrong) == [["forge.data.a", "forge.data.b"], ["forge.engine.x", "forge.errors"]]
    assert house.beside_or_above(wrong) == ["forge.errors (errors) imports forge.engine.x (engine)"]
