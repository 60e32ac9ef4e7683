"""profiler: NVTX ranges of phases and plugins, balanced whatever happens; nothing without CUDA."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import pytest
import torch

import forge
from forge.testing import fit_tiny, tiny_batches
from forge_plugins import Clip, Profiler
from tests.support.profiler_kit import Breaks
from tests.support.tasks import fit, make_batches


class Ranges:
    """What torch.cuda.nvtx does, kept: every range with the path of those around it."""

    def __init__(self) -> None:
        self.around: list[str] = []
        self.paths: list[str] = []

    def push(self, name: str) -> None:
        self.around.append(name)
        self.paths.append("/".join(self.around))

    def pop(self) -> None:
        assert self.around, "a range is closed that was not opened"
        self.around.pop()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """A CUDA device, as far as NVTX is concerned."""
    seen = Ranges()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", seen.pop)
    monkeypatch.setattr("forge_plugins.profiler.nvtx.on_cuda", lambda trainer: True)
    return seen


def profiler(**options: Any) -> Profiler:
    return Profiler(nvtx=True, repeat=0, **options)


def test_every_step_has_its_phases(ranges: Ranges) -> None:
    fit(plugins=[profiler()], train=make_batches(2), max_epochs=1)
    inside = ["transfer", "forward", "backward", "step"]
    steps = [path for n in (0, 1) for path in ("data", f"update {n}", *(f"update {n}/{name}" for name in inside))]
    assert ranges.paths[ranges.paths.index("update 0") - 1 :] == steps
    assert ranges.around == []


class Twice(forge.Plugin):
    """An event and a wrapper."""

    @forge.hookimpl
    def forge_step_end(self) -> None: ...

    @forge.hookimpl(wrapper=True)
    def forge_backward(self) -> Generator[None, Any, Any]:
        return (yield)


def test_hooks_of_plugins_have_ranges_beside_their_work(ranges: Ranges) -> None:
    fit(plugins=[profiler(), Twice(), Clip(1.0)], train=make_batches(1), max_epochs=1)
    of_plugins = [path for path in ranges.paths if ": forge_" in path and ("twice" in path or "clip" in path)]
    assert of_plugins.count("update 0/backward/twice: forge_backward") == 2  # before its yield, and after
    assert "update 0/clip: forge_edit_grads" in of_plugins
    assert "twice: forge_step_end" in of_plugins
    assert not any(path.endswith(("core: forge_forward", "profiler: forge_backward")) for path in ranges.paths)
    assert ranges.around == []


class Fails(Twice):
    """Fails in one of its hooks."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    @forge.hookimpl
    def forge_step_end(self) -> None:
        if self.where == "event":
            raise ZeroDivisionError("broken")

    @forge.hookimpl(wrapper=True)
    def forge_backward(self) -> Generator[None, Any, Any]:
        if self.where == "before":
            raise ZeroDivisionError("broken")
        result = yield
        if self.where == "after":
            raise ZeroDivisionError("broken")
        return result


@pytest.mark.parametrize("where", ["event", "before", "after"])
def test_ranges_are_closed_when_a_plugin_fails(where: str, ranges: Ranges) -> None:
    with pytest.raises(ZeroDivisionError, match="broken"):
        fit(plugins=[profiler(), Twice(), Fails(where)])
    assert ranges.paths
    assert ranges.around == []


def test_ranges_are_closed_when_a_step_or_the_data_fail(ranges: Ranges) -> None:
    def broken() -> Any:
        yield from make_batches(2)
        raise ZeroDivisionError("no more data")

    with pytest.raises(ZeroDivisionError, match="broken"):
        fit_tiny([profiler(), Twice()], task=Breaks(2))
    assert "update 2/forward" in ranges.paths
    assert ranges.around == []
    with pytest.raises(ZeroDivisionError, match="no more data"):
        fit(plugins=[profiler()], train=broken())
    assert ranges.paths[-1] == "data"
    assert ranges.around == []


def test_without_cuda_nothing_is_called_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: pytest.fail("there is no NVTX"))
    with caplog.at_level(logging.WARNING, "forge"):
        fit_tiny([profiler()], train=tiny_batches([4] * 2), max_epochs=1)
    assert "NVTX ranges need a CUDA device" in caplog.text
    assert "nothing was recorded" not in caplog.text
