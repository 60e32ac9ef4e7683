"""Run the micro-batch that failed once more, to learn which line of forward an error in backward belongs to."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from forge.contract.run import Run
from forge.contract.step import Step
from forge.snapshot.sandbox import without_side_effects
from forge.util.frames import folder_of, is_library
from forge.util.text import short_path
from forge.util.tracebacks import is_users, is_users_frame, walk


def is_in_backward(error: BaseException) -> bool:
    """Whether an error was raised in a backward pass."""
    return any(entry.tb_frame.f_code.co_name == "backward" for entry in walk(error.__traceback__))


def forward_line(trainer: Run, error: BaseException) -> str:
    """Return the user's line whose gradient failed; "" where it cannot be known. torch's anomaly mode records it."""
    if not _can_run(trainer) or not is_in_backward(error):
        return ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            _run(trainer, trainer.step)
    said = "\n".join(str(warning.message) for warning in caught)
    frames = re.findall(r'File "(.+?)", line (\d+), in .+', said)
    own = [place for place in frames if is_users(place[0])] or [place for place in frames if not is_library(place[0])]
    return f"{short_path(own[-1][0])}:{own[-1][1]}" if own else ""


def backward_line(trainer: Run) -> str:
    """Return the user's line that calls backward inside of the step; "" if there is none."""
    if not _can_run(trainer):
        return ""
    with _backwards() as lines:
        _run(trainer, trainer.step)
    return lines[0] if lines else ""


def _can_run(trainer: Run) -> bool:
    """Whether there is a micro-batch to run; on several ranks the others would have to run it too."""
    step, env = trainer.step, getattr(trainer, "env", None)
    return step is not None and bool(step.window) and (env is None or env.world == 1)


def _run(trainer: Run, step: Step | None) -> None:
    """Run the micro-batch, forward and backward; gradients, buffers and random numbers are restored."""
    assert step is not None
    hooks = trainer.hooks
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in trainer.task.parameters()]
    with without_side_effects(trainer), suppress(Exception):  # it is expected to fail
        output = hooks.forge_forward(step, hooks.forge_prepare_batch(step, step.window[step.micro]))
        loss = output if isinstance(output, Tensor) else output["loss"]
        loss.backward()
    for parameter, gradient in gradients:
        parameter.grad = gradient


@contextmanager
def _backwards() -> Iterator[list[str]]:
    """Collect the user's lines that begin a backward pass."""
    lines: list[str] = []
    before = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        if line := _caller(sys._getframe(1)):
            lines.append(line)
        return before(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield lines
    finally:
        torch.autograd.backward = before


def _caller(frame: FrameType | None) -> str:
    """Return the innermost line of the user's, where forge did not make the call."""
    while frame is not None and not frame.f_code.co_filename.startswith(folder_of("forge")):
        if is_users_frame(frame):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
