"""Optimizers with the habits of other libraries' ones, for runs that are killed: wrapping, strided, schedule-free."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer


class WrappingOptimizer(Optimizer):
    """Slow weights around another optimizer, with two states side by side, as in pytorch_optimizer's Lookahead."""

    def __init__(self, base: Optimizer):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> Any:
        places = [(g, i, p) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"])]
        return {"slow": {(g, i): dict(self.state[p]) for g, i, p in places}, "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups
        for (g, i), kept in state_dict["slow"].items():
            self.state[self.param_groups[g]["params"][i]] = {key: value.clone() for key, value in kept.items()}


class StridedOptimizer(SGD):
    """Keeps a column-major matrix, and adds over it in the order of the memory, as SOAP's products may."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            q = self.state[p].setdefault("q", torch.empty_strided((31, 31), (1, 31)).fill_(0.1))
            q.mul_(1 + p.grad.mean()).add_(torch.linspace(0, 1, 31 * 31).view(31, 31))
            p.sub_(p.grad * self.param_groups[0]["lr"] * (2 + q.T.sum().sin()))


class ScheduleFreeOptimizer(SGD):
    """Trains at one point and evaluates at another; the way there and back rounds."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(train_mode=False, k=0)

    def _move(self, training: bool, weight: float) -> None:
        for group in (group for group in self.param_groups if group["train_mode"] != training):
            group["train_mode"] = training
            for p in (p for p in group["params"] if "z" in self.state[p]):
                p.data.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        self._move(True, 0.1)

    def eval(self) -> None:
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                x = p.lerp(z, 1 - 1 / 0.9)
                z.sub_(p.grad, alpha=group["lr"])
                p.copy_(x.lerp_(z, 1 / group["k"]).lerp(z, 0.1))


def optimizer_of(seed: int, parameters: Any) -> Optimizer:
    """Return the optimizer of a run: AdamW for seed 0, then one of each kind in turn."""
    makers = (
        lambda: AdamW(parameters, lr=3e-3),
        lambda: WrappingOptimizer(AdamW(parameters, lr=3e-3)),
        lambda: StridedOptimizer(parameters, lr=3e-3),
        lambda: ScheduleFreeOptimizer(parameters, lr=3e-2),
    )
    return makers[seed % len(makers)]()
