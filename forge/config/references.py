"""References between the values of a recipe: `${trainer.seed}`, or `${.seed}` for the value beside it.

OmegaConf fills them in, one by one, while every other value with a reference is missing: so none can name another, and
what they make grows no faster than their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from typing import Any

from forge.config.guard import DEEPEST, SIZE, omegaconf
from forge.errors import RecipeError

MISSING = "???"
"""What OmegaConf takes as a value that is still to be given."""
Path = tuple[Any, ...]
"""The keys and places that lead to a value."""


def resolve(values: dict[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """Return values with their references filled in; an error names the key as `label` words it."""
    texts = [(path, text) for path, text in _leaves(values) if "${" in str(text) or text == MISSING]
    found = deepcopy(values)
    for path, _ in texts:
        _holder(found, path)[path[-1]] = MISSING
    held = omegaconf().create(found) if texts else None
    left = SIZE - len(str(values))
    for path, text in texts:
        here = label(".".join(map(str, path)))
        value = _filled(held, path, text, here)
        left -= len(str(value))
        if left < 0:
            raise RecipeError(
                f"{here}: the recipe has more than {SIZE:,} characters once references are filled in. Repeat less."
            )
        if any(len(path) + len(inner) > DEEPEST for inner, _ in _leaves(value)):
            raise RecipeError(f"{here}: nested deeper than {DEEPEST} levels once it is filled in. Nest less.")
        _holder(found, path)[path[-1]] = value
    return found


def _filled(held: Any, path: Path, text: str, here: str) -> Any:
    """Return a text with its references filled in from `held`, where all other texts with references are missing."""
    from omegaconf.errors import OmegaConfBaseException

    conf, holder, key = omegaconf(), _holder(held, path), path[-1]
    try:
        holder[key] = text
        value = holder[key]
        holder[key] = MISSING  # before a section is read that holds this very text
        return conf.to_container(value, throw_on_missing=True) if conf.is_config(value) else value
    except OmegaConfBaseException as error:
        why = str(error.msg or error).partition("\n")[0]
        raise RecipeError(
            f"{here}: {text[:80]!r} cannot be filled in: {why[:300]}. A reference names a value that the recipe gives, "
            "and that holds no reference itself."
        ) from error


def _holder(values: Any, path: Path) -> Any:
    """Return the mapping or list that holds the value at `path`."""
    return reduce(lambda holder, key: holder[key], path[:-1], values)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is no mapping and no list, or an empty one, with the keys that lead to it."""
    if isinstance(value, (dict, list)) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value
