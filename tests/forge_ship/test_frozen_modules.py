"""A frozen module is in an export only where the exported method uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.testing import TinyTask, tiny_batches


class Student(TinyTask):
    def __init__(self, uses: bool = False):
        super().__init__()
        self.uses = uses
        self.teacher: Any = forge.frozen(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.teacher(x) if self.uses else self.net(x)

    def validation_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self(batch[0]), self.teacher(batch[0]))}


@pytest.mark.parametrize("uses", [False, True])
def test_an_exported_program_has_it_where_it_is_used(uses: bool, tmp_path: Path) -> None:
    task = Student(uses)
    made = forge.export(task, to="pt2", out=tmp_path / "model.pt2", data=tiny_batches())
    program = torch.export.load(made.path)
    held = [*program.state_dict.values(), *program.constants.values()]
    assert any(torch.equal(tensor, task.teacher.weight) for tensor in held if isinstance(tensor, Tensor)) is uses
