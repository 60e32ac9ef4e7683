"""What the tests of probes share."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support.patients import Healthy


def task_with(loss: Any, outputs: int = 4) -> Healthy:
    task = Healthy()
    task.loss = loss  # pyright: ignore[reportAttributeAccessIssue]
    task.net[2] = nn.Linear(16, outputs)
    task.check_first_batch = False  # pyright: ignore[reportAttributeAccessIssue]
    return task
