"""Note random numbers that an evaluation draws: dropout that was left on gives the same wrong metrics every time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from forge.diagnose.checks.user_line import users_frame
from forge.diagnose.running import shares_numbers
from forge.rng import RNGState
from forge.util.text import short_path

if TYPE_CHECKING:
    from forge.contract.step import Step

logger = logging.getLogger("forge")


@contextmanager
def noted_draws(step: Step, by_call: bool) -> Iterator[None]:
    """On the first batch of a run's first evaluation, say if a global generator has moved; `by_call`: and by what."""
    trainer = step.trainer
    if step.stage == "train" or trainer.evaluated != 1:
        yield
        return
    before, watch = RNGState.capture(trainer.env.device), DrawWatch(trainer.env.device)
    with watch if by_call else nullcontext():
        yield
    moved = [] if shares_numbers(trainer) else _moved(before, RNGState.capture(trainer.env.device))
    told = f"draws in {step.stage}"
    if moved and trainer.env.is_main and not getattr(trainer.task, "keeps_evaluation_draws", told in trainer.said):
        trainer.said.add(told)
        logger.warning(
            "Note: the first %s batch drew random numbers from %s%s. The generators are restored after an evaluation, "
            "so every one draws the same and its metrics repeat. If you do not mean it, as with dropout that is left "
            "on, use self.training: F.dropout(x, p, self.training).",
            step.stage,
            " and ".join(moved),
            f", in {watch.call}" if watch.call else "",
        )


class DrawWatch(TorchFunctionMode):
    """Remembers the first call of a torch function that moves torch's default generator."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self.call = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.call or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        before = self._state()
        result = func(*args, **(kwargs or {}))
        if any(not torch.equal(a, b) for a, b in zip(before, self._state(), strict=True)):
            frame = users_frame()
            where = f" at {short_path(Path(frame.f_code.co_filename))}:{frame.f_lineno}" if frame is not None else ""
            self.call = f"{resolve_name(func) or getattr(func, '__name__', func)}{where}"
        return result

    def _state(self) -> list[torch.Tensor]:
        away = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *away]


def _moved(before: RNGState, after: RNGState) -> list[str]:
    """Return the global generators that have moved."""
    on_device = before.device is not None and after.device is not None and not torch.equal(before.device, after.device)
    return [
        name
        for name, moved in {
            "torch's generator": on_device or not torch.equal(before.torch, after.torch),
            "numpy.random": not all(np.array_equal(a, b) for a, b in zip(before.numpy, after.numpy, strict=True)),
            "Python's random": before.python != after.python,
        }.items()
        if moved
    ]
