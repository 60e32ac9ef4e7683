"""Checks of signatures: whether a step accepts forge's arguments."""

from __future__ import annotations

import inspect
from typing import Any

from forge.contract.task import STAGE_METHODS, TaskModule, defines
from forge.errors import TaskError

OWN_CALLS = ("forge_forward", "forge_micro_step", "forge_train_step")
"""Hooks by which a task calls its steps itself, with arguments of its own."""


def check_signature(task: TaskModule, stage: str, named: bool = False) -> None:
    """Refuse a step that does not accept forge's arguments: the batch, and with a dict of optimizers a name."""
    method = STAGE_METHODS[stage]
    if stage == "test" and not defines(task, method):
        method = STAGE_METHODS["val"]  # the default test_step calls it
    if not defines(task, method) or any(getattr(task, hook, None) is not None for hook in OWN_CALLS):
        return
    step = getattr(task, method)
    try:
        signature = inspect.signature(step, follow_wrapped=False)  # a decorator may add arguments
    except (TypeError, ValueError):
        return
    if _takes(signature, 2 if named else 1):
        return
    shown = f"{type(task).__name__}.{method}({', '.join(map(_shown, signature.parameters.values()))})"
    code = getattr(step, "__code__", None)
    place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: "
    raise TaskError(f"{place}{shown} cannot be called as forge calls it: {_advice(signature, stage, named)}")


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _shown(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}=..."


def _advice(signature: inspect.Signature, stage: str, named: bool) -> str:
    if named:
        return "configure_optimizers returned a dict, so it is called with (batch, name): which optimizer trains."
    required: list[Any] = [p.name for p in signature.parameters.values() if p.default is p.empty]
    if len(required) < 2:
        return "it is called with the batch."
    if required[1:] == ["name"]:
        return "configure_optimizers returned one optimizer, so it passes the batch alone. Drop name, or return a dict."
    counts = {"train": "self.trainer.step.index counts updates, self.trainer.step.micro the micro-batches of one"}.get(
        stage, "self.trainer.evaluated counts the batches that were evaluated"
    )
    return (
        f"it passes the batch alone. Drop {', '.join(required[1:])}: {counts}. A LightningModule runs unchanged: "
        "fit(forge.LightningAdapter(module), ...)."
    )
