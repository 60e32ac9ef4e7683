"""The module that runs: a thin shell around the task, so that DDP, FSDP and compile all see one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

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
        if stage == "train" and name is not None:
            return self.task.training_step(batch, name)  # pyright: ignore[reportCallIssue]
        return getattr(self.task, STAGE_METHODS[stage])(batch)


def direct_call(model: nn.Module) -> Callable[[Any], Any]:
    """One optimizer's training call on a batch: the task's own training_step, where the shell around it has nothing to
    add."""
    bare = type(model) is TaskCall and not (model._forward_hooks or model._forward_pre_hooks)
    if bare and model._compiled_call_impl is None:
        return cast(TaskCall, model).task.training_step
    return lambda batch: model(batch, "train", None)


@dataclass(slots=True)
class Build:
    """What `forge_build_model` works on: change `task` in place, or replace `model`."""

    task: TaskModule
    model: nn.Module
