"""Checks of the task before anything is built: its type, its methods and its layers."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from forge.contract.task import STAGE_METHODS, TaskModule, defines
from forge.diagnose.checks.signatures import check_signature
from forge.diagnose.checks.unregistered import refuse_hidden_layers, warn_of_plain_tensors
from forge.errors import TaskError


def check_task(task: Any, stages: Mapping[str, Any]) -> None:
    """Refuse an object that is no task, unregistered layers, and stages without a method."""
    if isinstance(task, type):
        made = f"{task.__name__}()"
        raise TaskError(
            f"Got the class {task.__name__}; pass an instance: "
            f"{f'forge.LightningAdapter({made})' if is_lightning(task) else made}."
        )
    if is_lightning(type(task)) and not isinstance(task, TaskModule):
        raise TaskError(
            f"{type(task).__name__} is a LightningModule. Wrap it: fit(forge.LightningAdapter(module), ...) runs it "
            "unchanged (docs/from-lightning.md)."
        )
    if not isinstance(task, TaskModule):
        raise TaskError(
            f"{type(task).__name__} is no forge.TaskModule. Subclass it and write training_step and "
            "configure_optimizers; a plain nn.Module can be an attribute of yours."
        )
    for stage, loader in stages.items():
        method = STAGE_METHODS[stage]
        if loader is not None and stage in ("train", "val") and not defines(task, method):
            refuse_near_miss(task, method)
            getattr(task, method)(None)  # the base method raises an error that explains it
        if loader is not None and stage != "train":  # the arguments of training depend on the optimizers
            check_signature(task, stage)
    refuse_hidden_layers(task)
    if "train" in stages:
        warn_of_plain_tensors(task)


def refuse_near_miss(task: TaskModule, method: str) -> None:
    """Refuse a method that is nearly called like one that is missing."""
    own = [name for kind in type(task).__mro__ if kind is not TaskModule for name in vars(kind)]
    near = get_close_matches(method, [name for name in own if not hasattr(TaskModule, name)], 1, 0.85)
    if near:
        error = TaskError(
            f"{type(task).__name__} defines no {method}, but {near[0]}, which forge never calls. Rename it to {method}."
        )
        error.finding = "method_name"
        raise error


def is_lightning(kind: type) -> bool:
    """Return whether a class is a LightningModule, of any package; Lightning is not imported."""
    return any(cls.__name__ == "LightningModule" for cls in kind.__mro__)
