"""What the tests of weights share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.support.tasks import Classifier


def prefixed(task: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in task.state_dict().items()}


def as_lightning(task: nn.Module, file: Path) -> None:
    content = {
        "epoch": 3,
        "global_step": 100,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": prefixed(task, "model."),
        "optimizer_states": [torch.optim.Adam(task.parameters()).state_dict()],
        "hyper_parameters": {"hidden": 8},
    }
    torch.save(content, file.with_suffix(".ckpt"))


class Wider(Classifier):
    """As Classifier, with another head and one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(8, 5)
        self.extra = nn.Linear(2, 2)
