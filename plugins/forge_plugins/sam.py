"""Sharpness-aware minimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import forge
from forge.errors import RecipeError, StackError
from forge.optim.optimizers import drop_gradients
from forge.optim.sharded import local, total_norm
from forge.snapshot.non_finite import moving_buffers
from forge.snapshot.sandbox import Owned, kept
from forge_plugins.torch_internals import foreach_abs, foreach_add_, foreach_mul_

TINY = 1e-12
"""Added to the gradient's norm, as in the authors' code, so that a gradient of 0 does not move the weights."""
ETA = 0.01
"""adaptive: added to every |w|, as in the paper, so that a weight of 0 moves too."""


class SAM(forge.Plugin):
    """Sharpness-aware minimisation: step with the gradient at the worst point nearby, towards flat minima.

    Each update runs its window twice (Foret et al. 2021). The first pass gives a gradient, along which the weights
    climb by a step of length `rho`. The second pass, over the same batches with the same random numbers, gives the
    gradient that is used. The weights are restored, bit for bit, before the optimizer steps. With `adaptive` each
    weight climbs in proportion to its own size (ASAM, Kwon et al. 2021), which needs a `rho` of 0.5 to 2.

    When to use it: for better generalisation, if twice the time per update is acceptable. It also needs memory for one
    more copy of the trained parameters. It reads nothing from the device.

    What you see: loss and metrics of the first pass, at the weights themselves, and `sharpness`, the increase of the
    loss by the climb. BatchNorm, and other modules that change buffers in a forward pass, do so only in the first pass.

    Together with: optimizers, schedules, `accumulate` (the whole window climbs), `clip` and `guard` work as usual, on
    the gradient that is used. With several optimizers each climbs with its own parameters in its own turn. A loss
    scaler (use bf16) and optimizers that run the window themselves, such as LBFGS, are refused.

    ::

        forge fit quickstart -p sam sam.rho=0.05
        forge fit quickstart -p sam sam.adaptive=true sam.rho=0.5
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        rho: float = 0.05
        "Length of the climb."
        adaptive: bool = False
        "Move each weight in proportion to its size (ASAM)."
        freeze_norm: bool = True
        "Restore buffers that the second pass changes, such as BatchNorm's statistics."

    config: Config
    conflicts = {"grad_scaler": "Use amp.dtype=bf16, which needs none."}
    provides = ("second_pass",)

    def __init__(self, *first: float, **values: Any):
        super().__init__(*first, **values)
        if not 0 < self.config.rho < math.inf:
            raise RecipeError(f"sam.rho is {self.config.rho:g}; it must be a number above 0.")
        self._buffers: list[Owned] = []

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb != "fit":
            return
        for entry in trainer.optimizers.entries.values():
            if entry.needs_closure:
                kind = type(entry.optimizer).__name__
                raise StackError(
                    f"sam cannot train with {kind}, which runs the window itself, any number of times, where sam "
                    "runs it exactly twice. Use another optimizer, or remove sam."
                )
        self._buffers = moving_buffers(trainer.task) if self.config.freeze_norm else []

    @forge.hookimpl
    def forge_train_step(self, step: forge.Step) -> bool:
        step.run_window()
        finalize = step.trainer.hooks.forge_finalize_grads
        if finalize is not None:
            finalize(step)  # the direction needs finalized gradients; finish() finalizes those of the second pass
        climbing = [parameter for parameter in step.parameters() if parameter.grad is not None]
        if climbing:
            self._run_above(step, climbing)
        step.finish()
        return True

    @forge.hookimpl
    def forge_end(self) -> None:
        self._buffers = []

    def _run_above(self, step: forge.Step, climbing: list[nn.Parameter]) -> None:
        """Replace `.grad` by the gradient at the end of the climb; restore weights and buffers."""
        below = step.loss
        with kept(climbing, self._buffers):
            self._climb(climbing)
            drop_gradients(step.optimizer)
            step.run_window(record=False, replay=True)
        if below is not None and step.loss is not None:
            step.record("sharpness" if step.name is None else f"sharpness/{step.name}", step.loss - below)

    @torch.no_grad()
    def _climb(self, parameters: list[nn.Parameter]) -> None:
        """Move along the gradient by `rho`. The gradient is not needed afterwards, so its memory holds the step."""
        sparse_or_not: list[Any] = [parameter.grad for parameter in parameters]
        whole = [grad if grad.layout is torch.strided else grad.to_dense() for grad in sparse_or_not]
        gradients, weights = [local(grad) for grad in whole], [local(parameter) for parameter in parameters]
        sizes = foreach_abs(weights) if self.config.adaptive else None
        if sizes is not None:
            foreach_add_(sizes, ETA)
            foreach_mul_(gradients, sizes)
        length = self.config.rho / (total_norm(whole) + TINY)
        if sizes is not None:
            foreach_mul_(gradients, sizes)
        foreach_mul_(gradients, length)
        foreach_add_(weights, gradients)
