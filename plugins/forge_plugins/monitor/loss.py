"""The loss at each look, and whether it falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge_plugins.monitor.modules import is_compiled

FALLS = 0.03
"""A loss falls whose second half is lower than its first by this share."""
FEWEST = 6
"""Looks that a trend needs."""
SURE = 2.0
"""Standard errors by which the noise of single windows is ruled out."""


class Losses:
    """Records the losses of a window from the outputs of the model, until it is closed."""

    def __init__(self, step: forge.Step):
        self._step = step
        self.seen: list[Tensor] = []
        "The loss of each micro-batch, on the device."
        model = step.trainer.model
        self._handle = None if is_compiled(model) else model.register_forward_hook(self._see)

    def _see(self, module: nn.Module, inputs: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if self._step.recording and isinstance(loss, Tensor) and loss.numel() == 1 and not torch.is_inference(loss):
            self.seen.append(loss.detach())

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()


def falls(losses: Sequence[float]) -> bool | None:
    """Return whether a loss falls over its looks; None if they are too few, or too noisy, to say."""
    first, second = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    if len(losses) < FEWEST:
        return None
    fall = fmean(first) - fmean(second) - FALLS * abs(fmean(first))
    noise = SURE * math.sqrt(variance(first) / len(first) + variance(second) / len(second))
    return fall > 0 if abs(fall) >= noise else None
