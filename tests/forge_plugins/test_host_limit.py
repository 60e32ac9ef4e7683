"""A GPU that waits for the host is named, with what capturing the update would gain."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_plugins import Progress
from forge_plugins.progress.host_limit import FIRST, LONGER, HostLimit


class Machine:
    """A host that takes `host` seconds to queue an update, and a GPU that takes `works` to compute it."""

    def __init__(self, host: float, works: float, waited: float = 0.0):
        self.host, self.works, self.waited = host, works, waited
        self.now = self.free = 0.0
        self.paused: list[float] = []

    def clock(self) -> float:
        return self.now

    def mark(self) -> Any:
        at = max(self.now, self.free)

        def elapsed_time(end: Any) -> float:
            return 1e3 * (end.at - at)

        return types.SimpleNamespace(
            at=at, query=lambda: at <= self.now, elapsed_time=elapsed_time, synchronize=lambda: None
        )

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self.free = max(self.now, self.free) + seconds

    def run(self, updates: int = 400) -> tuple[HostLimit | None, int]:
        limit: HostLimit | None = HostLimit(self, self.clock)
        for index in range(updates):
            step: Any = types.SimpleNamespace(index=index, data_wait=self.waited)
            pieces = 10
            for _ in range(pieces):
                self.now += self.host / pieces
                self.free = max(self.free, self.now) + self.works / pieces
            limit = limit.look(step)
            if limit is None:
                return None, index
        return limit, updates


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "waits for the host" in record.getMessage()]


@pytest.fixture(autouse=True)
def _infos(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge")


def test_a_gpu_that_waits_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(host=1.0e-3, works=0.125e-3)
    limit, _ = machine.run()
    assert limit is None
    (line,) = said(caplog)
    assert "takes 1 ms, and the GPU works for 0.125 ms" in line
    assert "8.0×" in line
    assert line.endswith("-p cuda_graph")
    assert machine.paused == pytest.approx(3 * [LONGER * 1.0e-3])


def test_a_gpu_that_is_busy_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(host=1.0e-3, works=1.5e-3)
    limit, at = machine.run()
    assert limit is None
    assert at < 2 * FIRST
    assert not machine.paused
    assert not said(caplog)


class Layers(forge.TaskModule):
    def __init__(self, layers: int = 6, width: int = 64):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: torch.Tensor) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(task: forge.TaskModule, batch: torch.Tensor, device: str, plugins: list[Any], updates: int) -> None:
    data = [batch.to(device)] * updates
    forge.Trainer(max_epochs=1, device=device, plugins=plugins, run_dir=False, log_every=1000).fit(task, data)


@pytest.mark.gpu
def test_small_updates_on_a_gpu_are_named(caplog: pytest.LogCaptureFixture) -> None:
    fit(Layers(), torch.ones(8, 64), "cuda", [Progress()], 300)
    (line,) = said(caplog)
    assert float(line.split("up to ")[1].split("×")[0]) > 1.3


@pytest.mark.gpu
def test_a_look_changes_no_bit() -> None:
    ends = []
    for plugins in ([], [Progress()]):
        torch.manual_seed(0)
        task = Layers()
        fit(task, torch.ones(8, 64), "cuda", plugins, 200)
        ends.append(torch.cat([p.detach().flatten() for p in task.parameters()]))
    assert torch.equal(*ends)
