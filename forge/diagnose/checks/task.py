"""Checks of the task before anything is built: its type, its methods and its layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from forge.contract.run import Run
from forge.contract.task import STAGE_METHODS, TaskModule, defines
from forge.diagnose.checks.signatures import check_signature
from forge.diagnose.checks.unregistered import refuse_hidden_layers, warn_of_plain_tensors
from forge.diagnose.checks.user_line import saying, warn_of
from forge.errors import TaskError
from forge.util.frames import libraries


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
    near = next((name for _, name, meant in near_misses(task) if meant == method), None)
    if near:
        error = TaskError(
            f"{type(task).__name__} defines no {method}, but {near}, which forge never calls. Rename it to {method}."
        )
        error.finding = "method_name"
        raise error


def warn_of_near_misses(trainer: Run) -> None:
    """Warn of methods that are nearly called like one that forge calls, and that the task does not define."""
    found = list(near_misses(trainer.task))
    texts = [f"forge never calls {kind.__name__}.{name}: did you mean {meant}?" for kind, name, meant in found]
    if found:
        with saying(trainer.said):
            warn_of(getattr(*found[0][:2]), " ".join(texts), "method_name")


def near_misses(task: TaskModule) -> Iterator[tuple[type, str, str]]:
    """Yield (class, method, the name that is nearly the same) for what the user's classes define."""
    missing = [name for name, value in vars(TaskModule).items() if callable(value) and not defines(task, name)]
    for kind in (kind for kind in type(task).__mro__ if kind.__module__.partition(".")[0] not in libraries()):
        for name, value in vars(kind).items():
            if inspect.isfunction(value) and not hasattr(TaskModule, name):
                yield from ((kind, name, meant) for meant in get_close_matches(name, missing, 1, 0.85))


def is_lightning(kind: type) -> bool:
    """Return whether a class is a LightningModule, of any package; Lightning is not imported."""
    return any(cls.__name__ == "LightningModule" for cls in kind.__mro__)
