"""The API reference lists documented attributes and methods, inherited ones included."""

from __future__ import annotations

from typing import ClassVar

from tests.support.docs_pages import load_script


class Base:
    """An internal base."""

    count: int = 0
    "How many."
    hidden: int = 0
    shared: str = "base"
    "Overridden below."

    def ask(self) -> None:
        """Ask."""


class Derived(Base):
    """Documented through its base."""

    limit: ClassVar[int] = 3
    "The limit."
    shared: str = "derived"
    "From the class itself."

    def __init__(self) -> None:
        self.path: str | None = None
        "The path."
        self._private: int = 1
        "Not shown."
        local = 2
        "Not an attribute."
        self.total = local

    @property
    def half(self) -> float:
        """Half of it."""
        return self.total / 2


def test_attributes_and_methods_come_from_every_internal_base() -> None:
    fields, methods = load_script("make_api").members(Derived)
    assert fields.splitlines()[2:] == [
        "| `limit` | `int` | The limit. |",
        "| `shared` | `str` | From the class itself. |",
        "| `path` | `str \\| None` | The path. |",
        "| `half` | `float` | Half of it. |",
        "| `count` | `int` | How many. |",
    ]
    assert methods.splitlines()[2:] == ["| `ask()` | Ask. |"]
