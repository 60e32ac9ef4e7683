"""Plugins that a trial run is without: those that save, stop or only look."""

from __future__ import annotations

import pytest

from forge.config.build import make_plugins
from forge.snapshot.left_out import SCHEDULE, is_left_out


@pytest.mark.parametrize(
    ("name", "also", "is_out"),
    [
        *[(name, (), True) for name in ("checkpoint", "guard", "jsonl")],
        *[(name, (), False) for name in ("clip", "ema", "schedule")],
        ("schedule", (SCHEDULE,), True),
        ("clip", (SCHEDULE,), False),
    ],
)
def test_what_saves_stops_or_looks_is_left_out(name: str, also: tuple[str, ...], is_out: bool) -> None:
    [plugin] = make_plugins({name: {}})
    assert is_left_out(plugin, *also) is is_out
