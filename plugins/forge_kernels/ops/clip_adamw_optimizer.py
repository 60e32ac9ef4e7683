"""ClipAdamW: AdamW with gradient clipping by global norm, entirely on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from forge.errors import KernelError
from forge_kernels.contract import falls_back, plain, unusable
from forge_kernels.ops.clip_adamw import ops, supports, unreadable
from forge_kernels.ops.clip_adamw_tables import ClipPlan, Lists, capturing, keep_in_capture, matching_order


class ClipAdamW(AdamW):
    """`torch.nn.utils.clip_grad_norm_` over all parameter groups, then `torch.optim.AdamW(fused=True)`.

    On CUDA a step is three launches for any number of tensors and groups, can be captured into a CUDA graph, and leaves
    gradients unchanged. Elsewhere torch's own functions run, and clip gradients in place. State, schedules and loss
    scaling are AdamW's. `total_norm` is the norm of the last step's gradients before clipping, on their device;
    max_norm=None computes the norm and clips nothing.

    ::

        optimizer = ClipAdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_norm=1.0)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_norm: float | None = 1.0,
    ):
        if max_norm is not None and not max_norm >= 0:
            raise KernelError(f"ClipAdamW: max_norm is {max_norm}; it must be 0 or more, or None to clip nothing.")
        self.max_norm = max_norm
        self.total_norm: Tensor | None = None
        self._plan: ClipPlan | None = None
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, capturable=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_norm": self.max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the state, also of a plain AdamW, with this optimizer's flags and step counters on the device."""
        super().__setstate__(state)
        self.total_norm = self._plan = None
        self._step_supports_amp_scaling = True
        for group in self.param_groups:
            group.update(fused=True, capturable=True, foreach=None)
            for param in group["params"]:
                if "step" in self.state.get(param, ()):
                    self.state[param]["step"] = self.state[param]["step"].to(param.device, torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raise KernelError for a repeated parameter, which programs would update concurrently."""
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        if len(set(params)) < len(params):
            raise KernelError("ClipAdamW: a parameter group has the same parameter twice; each is updated once.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and update; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists, groups = self._lists()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        plan, lists = self._plan_for(lists, groups, found_inf, grad_scale)
        if plan is None:
            self._step_as_torch(lists.grads, found_inf, grad_scale)
            return loss
        settings = [(g["lr"], *g["betas"], g["eps"], g["weight_decay"]) for g in self.param_groups]
        self.total_norm = ops.run(plan, settings, self.max_norm, found_inf, grad_scale)
        increment_version(lists.params)  # autograd does not see what a kernel writes
        return loss

    def _lists(self) -> tuple[Lists, list[int]]:
        """Return all parameters that have a gradient, with gradients, moments and counters, and the group of each."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        groups: list[int] = []
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    params.append(param)
                    grads.append(grad)
                    groups.append(number)
        states = [self.state[param] for param in params]
        if not all(states):
            if capturing(params[0].device):
                raise KernelError(
                    "ClipAdamW: a parameter's first step is being captured into a CUDA graph; each replay would begin "
                    "with new moments. Step once before the capture."
                )
            for group in self.param_groups:
                self._init_group(group, [], [], [], [], [], [])
        moments = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        return Lists(params, grads, *moments), groups

    def _plan_for(self, lists: Lists, groups: list[int], *flags: Tensor | None) -> tuple[ClipPlan | None, Lists]:
        """Return the plan for these tensors, the last step's if it still fits, or None if the kernel cannot run. Return
        its tensors too, to keep alive until the launches are queued: a gradient may be a copy."""
        refused, last = self._refuses(lists, *flags), self._plan
        if refused is None and last is not None and last.fits(lists, groups):
            return last, lists
        self._plan = None
        refused = refused or supports(*lists, lr=0.0)
        if not falls_back("ClipAdamW", refused):
            lists = matching_order(lists)
            self._plan = last if last is not None and last.fits(lists, groups) else ClipPlan(lists, groups)
        if last is not None and last is not self._plan:
            keep_in_capture(last.device, last)
        return self._plan, lists

    def _refuses(self, lists: Lists, *flags: Tensor | None) -> str | None:
        """Return why the kernel cannot run, or None: only cheap checks of what may change from step to step."""
        if not lists.params:
            return "no parameter has a gradient"
        if not plain():
            return "it supports neither torch.func nor forward-mode differentiation"
        first = lists.params[0]
        if type(first) is Parameter and (reason := unusable(first)):
            return reason
        for group in self.param_groups:
            if group["amsgrad"] or group["maximize"]:
                return "it supports neither amsgrad nor maximize"
            if reason := unreadable(first.device, group["lr"], *flags):
                return reason
        return None

    def _step_as_torch(self, grads: Sequence[Tensor], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        if grad_scale is not None:
            for grad in grads:
                grad.div_(grad_scale.to(grad.device))  # the norm is that of the unscaled gradients
        norm = get_total_norm(grads)
        if self.max_norm is not None:
            clip_grads_with_norm_([p for group in self.param_groups for p in group["params"]], self.max_norm, norm)
        self.total_norm = getattr(norm, "full_tensor", lambda: norm)()  # over all ranks, if gradients are sharded
        for group in self.param_groups:
            lists: Any = ([], [], [], [], [], [])
            self._init_group(group, *lists)
            beta1, beta2 = group["betas"]
            adamw(
                *lists,
                fused=True,
                found_inf=found_inf,
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
