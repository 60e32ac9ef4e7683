"""An evaluation that moves a global generator says so once, and names the call where it can."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import forge
from forge.testing import TinyTask, tiny_batches

NOTE = "drew random numbers from"


class Left(TinyTask):
    """Draws in its validation as `how` says."""

    how = "functional"

    def validation_step(self, batch: Any) -> Any:
        inputs: Tensor = batch[0]
        if self.how == "functional":
            inputs = F.dropout(inputs, 0.5)  # training=True is the default
        elif self.how == "module":
            self.train()
        elif self.how == "method":
            inputs = inputs + torch.empty_like(inputs).normal_()
        elif self.how == "numpy":
            inputs = inputs * np.random.rand()
        elif self.how == "python":
            inputs = inputs * random.random()
        elif self.how == "own":
            inputs = inputs + torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1))
        return {"loss": F.cross_entropy(self(inputs), batch[1])}


def fit(how: str, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    task = Left()
    task.how = how
    settings = {"max_epochs": 3, "seed": 0, "run_dir": False, "device": "cpu", "plugins": [], **options}
    forge.Trainer(**settings).fit(task, tiny_batches(), tiny_batches(seed=1))
    return [message for message in caplog.messages if NOTE in message]


@pytest.mark.parametrize(
    ("how", "generator", "call"),
    [
        ("functional", "torch's generator", "torch.nn.functional.dropout at "),
        ("module", "torch's generator", "torch.nn.functional.dropout"),
        ("method", "torch's generator", "torch.Tensor.normal_ at "),
        ("numpy", "numpy.random", ""),
        ("python", "Python's random", ""),
    ],
)
def test_a_draw_in_validation_is_noted_once(
    how: str, generator: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = fit(how, caplog)
    assert said.startswith(f"Note: the first val batch {NOTE} {generator}")
    assert call in said
    if call.endswith("at "):
        assert "test_draws.py:" in said


@pytest.mark.parametrize("how", ["none", "own"])
def test_an_evaluation_that_draws_nothing_is_silent(how: str, caplog: pytest.LogCaptureFixture) -> None:
    assert fit(how, caplog) == []


def test_a_loader_that_draws_is_not_the_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    """A DataLoader draws a seed for its workers whenever it is iterated."""
    task = Left()
    task.how = "none"
    rows = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*tiny_batches(), strict=True)))
    forge.Trainer(plugins=[], run_dir=False, device="cpu").validate(task, torch.utils.data.DataLoader(rows, 8))
    assert not [message for message in caplog.messages if NOTE in message]


def test_the_note_changes_nothing_that_is_drawn() -> None:
    runs = []
    for look in (True, False):
        task = Left()
        vars(task)["check_first_batch"] = look
        torch.manual_seed(3)
        runs.append(forge.Trainer(plugins=[], run_dir=False, device="cpu").validate(task, tiny_batches()))
    assert runs[0] == runs[1]
