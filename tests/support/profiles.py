"""What the quick profile runs of a test that the long one runs in full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

from tests.conftest import PROFILE

few = settings(max_examples=3 if PROFILE == "quick" else 500)
"""For tests that train, start processes or draw with every example."""


def covering(*axes: Iterable[Any]) -> list[Any]:
    """The product of parameters, of which the quick profile runs a part that has each of them at least once."""
    values = [list(axis) for axis in axes]
    places = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    chosen = [
        (tuple(axis[i] for axis, i in zip(values, each, strict=True)), each in places)
        for each in itertools.product(*(range(len(axis)) for axis in values))
    ]
    return [pytest.param(*each, marks=() if quick else pytest.mark.slow) for each, quick in chosen]


def some(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Parameters, or tuples of them, of which the quick profile runs the first few."""
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=() if at < quick else pytest.mark.slow) for at, value in enumerate(each)]
