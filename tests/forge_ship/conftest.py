"""Exports are run by a process of their own; in the quick profile it is forked."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest

from forge_ship import runner
from tests.support import forked


@pytest.fixture(autouse=True, scope="module")
def quick_runner() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "subprocess", types.SimpleNamespace(Popen=forked.Popen))
        yield
