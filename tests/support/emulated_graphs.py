"""CUDA graphs without a CUDA device: a graph that runs its update again takes the place of a real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.rng import RNGState
from forge.testing import assert_same
from forge_plugins import CudaGraph
from forge_plugins import cuda_graph as module
from forge_plugins.cuda_graph import captured


class Again:
    """A graph in host memory: its capture leaves no trace, and a replay runs the update again."""

    pool = None

    def __init__(self, device: torch.device, pool: Any = None):
        self.body: Callable[[], None] = lambda: None

    def capture(self, body: Callable[[], None]) -> None:
        self.body = body
        task, optimizers = RUNNING["task"], list(RUNNING["trainer"].optimizers.values())
        weights, states = copy.deepcopy(task.state_dict()), [copy.deepcopy(o.state_dict()) for o in optimizers]
        others = [(tensor, tensor.clone()) for tensor in RUNNING["others"]]
        now = RNGState.capture(torch.device("cpu"))
        try:
            self.replay()
        finally:
            with torch.inference_mode():  # a buffer of an evaluation bears nothing else
                for name, tensor in task.state_dict().items():
                    tensor.copy_(weights[name])
            for tensor, value in others:
                tensor.copy_(value)
            for optimizer, state in zip(optimizers, states, strict=True):
                for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                    for parameter, index in zip(group["params"], saved["params"], strict=True):
                        for key, value in state["state"].get(index, {}).items():
                            optimizer.state[parameter][key].copy_(value)
            if any(isinstance(module, nn.Dropout) for module in task.modules()):  # a device's own numbers
                now.restore(torch.device("cpu"))

    def replay(self) -> None:
        RUNNING["in_graph"] = True
        try:
            self.body()
        finally:
            RUNNING["in_graph"] = False


class Straight:
    """Inputs in host memory."""

    def __init__(self, tensors: list[Tensor], device: torch.device):
        self.tensors = [tensor.clone() for tensor in tensors]

    def load(self, tensors: list[Tensor]) -> None:
        for there, here in zip(self.tensors, tensors, strict=True):
            there.copy_(here)


RUNNING: dict[str, Any] = {}
"""The run under way, whether a graph runs, and other tensors in which a capture must leave no trace."""


class OnADevice(forge.Plugin):
    """Means stay where they are, as on an accelerator."""

    observer = True

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        trainer.means.on_host = False
        RUNNING.update(task=trainer.task, trainer=trainer, in_graph=False, others=[])


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `cuda_graph` run on the CPU, with graphs that run their update again."""
    monkeypatch.setattr(captured, "Graph", Again)
    monkeypatch.setattr(captured, "Inputs", Straight)
    monkeypatch.setattr(module.fitness, "of_the_run", lambda trainer, optimizers: None)
    monkeypatch.setattr(module, "reads_of_the_device", lambda: nullcontext([]))


class Shrink(forge.Plugin):
    """Clipping whose norm stays a tensor on the CPU too."""

    capturable = True

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        gradients = [p.grad for p in step.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(0.1 / norm.clamp(min=0.1))
        step.record("norm", norm)


class Net(forge.TaskModule):
    """Dropout, BatchNorm, two metrics."""

    def __init__(self, kind: str = "AdamW", **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.kind, self.options = kind, options

    def training_step(self, batch: Any) -> Any:
        out = self.net(batch[0])
        accuracy = (out.argmax(-1) == batch[1]).float().mean()
        return {"loss": F.cross_entropy(out.float(), batch[1]), "accuracy": accuracy}

    def validation_step(self, batch: Any) -> Any:
        return {"loss": F.cross_entropy(self.net(batch[0]).float(), batch[1])}

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.kind)(self.parameters(), lr=2.0**-7, fused=True, **self.options)


def batches(count: int = 12, last: int | None = None) -> list[Any]:
    make = torch.Generator().manual_seed(1)
    sizes = [8] * (count - 1) + [last or 8]
    return [(torch.randn(n, 6, generator=make), torch.randint(3, (n,), generator=make)) for n in sizes]


def run(plugins: list[Any], data: Any = None, task: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    task = Net() if task is None else task
    logs: list[Any] = []

    @forge.on("log")
    def keep(update: int, metrics: dict[str, Any]) -> None:
        logs.append((update, {k: v for k, v in metrics.items() if not k.startswith(("rates", "time"))}))

    settings = {"max_epochs": 3, "seed": 3, "device": "cpu", "log_every": 5, "run_dir": False, **options}
    trainer = forge.Trainer(plugins=[OnADevice(), *plugins, keep], **settings)
    trainer.fit(task, batches() if data is None else data, None)
    return task, logs


def compare(plugins: Any, least: int, data: Any = None, task: Any = Net, **options: Any) -> CudaGraph:
    graph = CudaGraph(strict=True)
    plain, plain_logs = run(plugins(), data, task(), **options)
    ours, logs = run([*plugins(), graph], data, task(), **options)
    assert graph.replayed >= least
    assert_same(ours, plain)
    assert logs == plain_logs
    return graph
