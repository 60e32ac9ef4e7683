"""The module that runs: a thin shell around the task, so that DDP, FSDP and compile all see one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from forge.task import STAGE_METHODS, TaskModule

PHASES = ("surgery", "shard", "remat", "compile", "parallel")
"""The phases of `forge_build_model`, in order."""


class TaskCall(nn.Module):
    """`model(batch, stage, name=None)` calls the task's method for that stage."""

    def __init__(self, task: TaskModule):
        super().__init__()
        self.task = task

    def forward(self, batch: Any, stage: str, name: str | None = None) -> Any:
        task = self._modules["task"]
        if stage == "train" and name is not None:
            return task.training_step(batch, name)  # pyright: ignore
        return getattr(task, STAGE_METHODS[stage])(batch)

    def __call__(self, batch: Any, stage: str, name: str | None = None) -> Any:
        # torch's __call__ is for hooks and compiled modules; this shell has neither unless a strategy gave it some
        if self._compiled_call_impl is not None or self._forward_hooks or self._forward_pre_hooks or name is not None:
            return super().__call__(batch, stage, name)
        return getattr(self._modules["task"], STAGE_METHODS[stage])(batch)


@dataclass(slots=True)
class Build:
    """What `forge_build_model` works on: change `task` in place, or replace `model`."""

    task: TaskModule
    model: nn.Module
