"""How large a document from an untrusted text may become.

Apart from the parser, whose regular expressions take a tenth of the CPU time that it takes to import the Trainer.
"""

from __future__ import annotations

from forge.errors import RecipeError

MOST = 2**17
"""The size of a text, and of the values that it makes: their characters, and VALUE for each."""
VALUE = 8
DEEPEST = 20
"""Levels of nesting."""
LONGEST = 200
"""Characters of a key: each value is known by its full key, the keys of all levels joined."""


class Budget:
    """What the values of one document may still take."""

    def __init__(self, what: str):
        self.what, self.left = what, MOST

    def spend(self, size: int, depth: int = 0) -> None:
        """Count a value before it is made; raise a RecipeError if it is one too many, or too deep."""
        self.left -= size
        if self.left < 0:
            raise RecipeError(
                f"{self.what} has more than {MOST:,} characters once references and aliases are filled in. Repeat less."
            )
        if depth > DEEPEST:
            raise RecipeError(f"{self.what} is nested deeper than {DEEPEST} levels. Nest less.")
