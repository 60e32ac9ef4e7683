"""Step torch's Adam and AdamW as their own `step` does, at less cost to the host.

`Adam.step` spends much of its time around the arithmetic: hooks, a record for the profiler, and checks of every
parameter. The direct step hands the same lists to the same function of torch, so every bit is the same. What somebody
watches or has replaced (hooks, a `step` of their own, a profiler) goes through `step`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.adam import adam

from forge.torch_internals import global_step_post_hooks, global_step_pre_hooks, profiler_enabled

PASSED = ("foreach", "capturable", "differentiable", "fused", "amsgrad", "lr", "weight_decay", "eps", "maximize")
"""Options of a group that torch's function takes under their own names."""
NEEDED = {*PASSED, "beta1", "beta2", "has_complex", "grad_scale", "found_inf", "decoupled_weight_decay"}


class DirectAdam:
    """The step of one Adam or AdamW."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self._class_step = type(optimizer).step
        self._groups = 0
        self._plain = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> DirectAdam | None:
        """Return the direct step of an optimizer, if it is torch's own Adam or AdamW."""
        if type(optimizer) not in (Adam, AdamW) or not set(inspect.signature(adam).parameters) >= NEEDED:
            return None
        own = inspect.unwrap(type(optimizer).step).__code__.co_filename == inspect.unwrap(adam).__code__.co_filename
        return cls(optimizer) if own else None

    def step(self) -> bool:
        """Step, and return True; or return False where the optimizer's own `step` must be called."""
        optimizer: Any = self.optimizer
        if self._is_watched(optimizer):
            return False
        gathered = []
        state = optimizer.state
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [state[p] for p in params]
            if not all(states):  # the first step makes the state
                return False
            gathered.append((group, params, states))
        if len(gathered) != self._groups:
            self._look(gathered)
        if not self._plain:
            return False
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        with torch.no_grad():
            for group, params, states in gathered:
                beta1, beta2 = group["betas"]
                adam(
                    params,
                    [p.grad for p in params],
                    [s["exp_avg"] for s in states],
                    [s["exp_avg_sq"] for s in states],
                    [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
                    [s["step"] for s in states],
                    beta1=beta1,
                    beta2=beta2,
                    has_complex=False,
                    grad_scale=scale,
                    found_inf=found,
                    decoupled_weight_decay=group["decoupled_weight_decay"],
                    **{name: group[name] for name in PASSED},
                )
        return True

    def _is_watched(self, optimizer: Any) -> bool:
        """Whether somebody hears of a step, or has replaced it. A schedule of torch's wraps it to note that it ran."""
        replaced = optimizer.__dict__.get("step")
        if replaced is not None:
            if not getattr(replaced, "_wrapped_by_lr_sched", False):
                return True
            if inspect.unwrap(replaced) is not inspect.unwrap(self._class_step):
                return True
            optimizer._opt_called = True
        return bool(
            type(optimizer).step is not self._class_step
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or global_step_pre_hooks
            or global_step_post_hooks
            or profiler_enabled()
        )

    def _look(self, gathered: list[Any]) -> None:
        """Note whether all groups hold plain numbers, and are stepped outside of graphs."""
        self._groups = len(gathered)
        self._plain = not any(
            group["differentiable"] or group["capturable"] or any(torch.is_complex(p) for p in group["params"])
            for group, _, _ in gathered
        )
