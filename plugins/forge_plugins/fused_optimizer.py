"""Fused optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import forge
from forge.optim.optimizers import Optimizers

logger = logging.getLogger("forge")

DEVICES: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("cpu", "cuda", "mps"),
    Adam: ("cpu", "cuda", "mps"),
    AdamW: ("cpu", "cuda", "mps"),
    Adagrad: ("cpu",),
}
"""Optimizers with a fused step, and where torch has it."""
CHANGED = ("fused", "foreach")


class FusedOptimizer(forge.Plugin):
    """Step torch's SGD, Adam, AdamW and Adagrad in one kernel per group of tensors (`fused=True`).

    The class, the options and the state of the optimizer stay the same. An optimizer that has no fused step on this
    device, or that sets `fused` or `foreach` itself, is left alone, and the log says so; so is SGD with momentum, whose
    fused step fails where a parameter gets its first gradient later (a frozen one, an expert).

    When to use it: for models with many small parameters, where the step costs many launches. The kernel multiplies and
    adds in another order than the plain step, so the last bits differ.

    ::

        forge fit quickstart -p fused_optimizer
    """

    provides = ("fused_step",)
    cures = {"host": "-p {name}, which updates all parameters in one call"}
    capturable = True

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @forge.hookimpl(wrapper=True)
    def forge_build_optimizers(self, trainer: forge.Run) -> Generator[None, Optimizers, Optimizers]:
        built = yield
        self._before = []
        for name, optimizer in built.items():
            why_not = self._fuse(optimizer)
            if why_not:
                label = type(optimizer).__name__ if name is None else f"{type(optimizer).__name__} ({name})"
                logger.info("fused_optimizer: %s runs as written: %s.", label, why_not)
        return built

    @forge.hookimpl
    def forge_end(self) -> None:
        for group, options in self._before:
            group.update(options)
        self._before = []

    def _fuse(self, optimizer: Optimizer) -> str:
        """Switch an optimizer to its fused step, or return why not."""
        if type(optimizer) not in DEVICES:
            return "torch has no fused step for it"
        for group in optimizer.param_groups:
            if group.get("fused") is not None or group.get("foreach") is not None:
                return "it chooses its step itself"
            if type(optimizer) is SGD and group["momentum"]:
                return "torch's fused SGD with momentum fails where a parameter gets its first gradient later"
            if group.get("differentiable") or group.get("capturable"):
                return "its step is differentiable or captured"
            for parameter in group["params"]:
                if parameter.device.type not in DEVICES[type(optimizer)]:
                    return f"torch has no fused step on {parameter.device.type}"
                if not torch.is_floating_point(parameter) or type(parameter.data) is not torch.Tensor:
                    return "some parameters are not plain floating point tensors"
        for group in optimizer.param_groups:
            self._before.append((group, {key: group[key] for key in CHANGED if key in group}))
            group["fused"], group["foreach"] = True, False
        if type(optimizer) is not Adagrad:
            optimizer._step_supports_amp_scaling = True  # pyright: ignore[reportAttributeAccessIssue]
        return ""
