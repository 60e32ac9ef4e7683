"""What the tests of ddp share."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge.testing import TinyTask, tiny_batches
from forge_plugins import DDP

SIZES = (8, 8, 8, 8, 5, 1)
"""Five samples on four ranks are uneven; one sample leaves all but one rank without any."""


class Plain(TinyTask):
    """TinyTask without what depends on the rank: no dropout, no batch statistics; in float64."""

    def __init__(self, seed: int = 0, lr: float = 0.1):
        super().__init__(seed, 0.0, lr)
        self.net.register_module("1", nn.LayerNorm(8))
        self.double()


def wide(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    return [(x.double(), y) for x, y in tiny_batches(sizes, seed)]


def train(task: forge.TaskModule, plugins: list[Any], data: Any = None, **options: Any) -> dict[str, Any]:
    """Fit; on several ranks with ddp. Weights, metrics and counters."""
    several = [DDP()] if "RANK" in os.environ else []
    options = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False, "log_every": 2, **options}
    trainer = forge.Trainer(plugins=[*plugins, *several], **options)
    result = trainer.fit(task, wide() if data is None else data, wide(1))
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    return {"weights": weights, "metrics": result.metrics, "updates": result.updates, "stop": result.stop_reason}


class Reader(forge.TaskModule):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any) -> Tensor:
        self.seen.append(batch[0].flatten().tolist())
        return (batch[0] * self.weight).mean()

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        return {"mean": batch[0].mean(), "largest": batch[0].max()}

    def predict_step(self, batch: Any) -> list[float]:
        return batch[0].flatten().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def options() -> list[float]:
    found = []
    short = "bf16" if torch.version.cuda else "fp16"  # torch built for the CPU refuses bf16
    for given_options in ({"compress": short}, {"static_graph": True}, {"bucket_mb": 0.001, "bucket_view": False}):
        task = Plain()
        forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=False, plugins=[DDP(**given_options)]).fit(
            task, wide()
        )
        found.append(float(sum(p.abs().sum() for p in task.parameters())))
    return found
