"""Exports are run by a process of their own; in the quick profile it is forked."""

from __future__ import annotations

import types

import pytest

from forge_ship import runner
from tests.support import forked


@pytest.fixture(autouse=True)
def quick_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.SimpleNamespace(PIPE=runner.subprocess.PIPE, Popen=forked.Popen)
    monkeypatch.setattr(runner, "subprocess", stand_in)
