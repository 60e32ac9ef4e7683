"""A GPU that waits for the host is named, with what capturing the update would gain."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_plugins import Spans
from forge_plugins.spans.waiting import FIRST, LONGER, WaitingGpu


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

    def run(self, updates: int = 400) -> tuple[WaitingGpu, int]:
        looks = WaitingGpu(self)
        for index in range(updates):
            step: Any = types.SimpleNamespace(index=index, data_wait=self.waited)
            pieces = 10
            for _ in range(pieces):
                self.now += self.host / pieces
                self.free = max(self.free, self.now) + self.works / pieces
            if not looks.look(step, self.host):
                return looks, index
        return looks, updates


def test_a_gpu_that_waits_is_measured_behind_pauses() -> None:
    machine = Machine(host=1.0e-3, works=0.125e-3)
    looks, _ = machine.run()
    line = looks.sentence(1.0e-3)
    assert "takes 1 ms, and the GPU works for 0.125 ms" in line
    assert "8.0×" in line
    assert line.endswith("-p cuda_graph")
    assert machine.paused == pytest.approx(3 * [LONGER * 1.0e-3])


@pytest.mark.parametrize("machine", [Machine(1.0e-3, 1.5e-3), Machine(1.0e-3, 0.1e-3, waited=0.5e-3)])
def test_a_gpu_that_is_busy_or_waits_for_data_is_left_alone(machine: Machine) -> None:
    looks, at = machine.run()
    assert at < 2 * FIRST
    assert not machine.paused
    assert not looks.sentence(1.0e-3)


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
    caplog.set_level(logging.INFO, "forge")
    fit(Layers(), torch.ones(8, 64), "cuda", [Spans()], 300)
    (line,) = (r.getMessage() for r in caplog.records if "waits for the host" in r.getMessage())
    assert float(line.split("up to ")[1].split("×")[0]) > 1.3


@pytest.mark.gpu
def test_a_look_changes_no_bit() -> None:
    ends = []
    for plugins in ([], [Spans()]):
        torch.manual_seed(0)
        task = Layers()
        fit(task, torch.ones(8, 64), "cuda", plugins, 200)
        ends.append(torch.cat([p.detach().flatten() for p in task.parameters()]))
    assert torch.equal(*ends)
