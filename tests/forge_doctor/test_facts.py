"""What a run consists of, as the table before a long run tells it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from forge_doctor.doctor import doctor
from tests.support.patients import Healthy, splits


class Drops(Healthy):
    """Has layers that do something else in training, and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.02)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def test_a_run_is_told_by_what_it_consists_of() -> None:
    facts = doctor(Drops(), *splits(), recipe="default").facts
    assert "train: 160 samples" in facts["the data"]
    assert "shuffled; val:" in facts["the data"]
    assert "in one order" in facts["the data"]
    assert "244 weights, 244 trained; cross_entropy" in facts["model and loss"]
    assert facts["optimizer and schedule"] == "AdamW, rate 0.003, decay 0.02, StepLR"
    assert "9 tensors of the model" in facts["what a checkpoint holds"]
    assert "1 layers of dropout are off; 1 layers of batch" in facts["how validation differs"]
    assert "it tells accuracy" in facts["how validation differs"]
    assert "not finite, by guard" in facts["how a failure is noticed"]
    assert "checkpoint kept" in facts["how a failure is noticed"]
