"""Lookahead (Zhang et al., 2019, https://arxiv.org/abs/1907.08610) as a forge plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import forge
from forge.engine.trainer import Trainer

__all__ = ["Lookahead"]


class Lookahead(forge.Plugin):
    """Let slow weights follow the optimizer's fast ones, and start the fast ones afresh from there.

    After every `every` updates the slow weights move by `alpha` towards the fast weights, which are then set to the
    slow ones. Skipped updates do not count. The distance covered is logged as `lookahead/distance`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: int = 5
        "Updates between two meetings of slow and fast weights (k in the paper)."
        alpha: float = 0.5
        "How far the slow weights move towards the fast ones: 0 not at all, 1 all the way."

        def __post_init__(self) -> None:
            if self.every < 1:
                raise ValueError(f"lookahead.every is {self.every}; it must be at least 1.")
            if not 0 <= self.alpha <= 1:
                raise ValueError(f"lookahead.alpha is {self.alpha:g}; it must lie between 0 and 1.")

    config: Config
    provides = ("lookahead",)
    before = ("averaged_weights",)  # what averages weights shall see the slow ones, where they have just met

    @forge.hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        # made here and not in __init__: one plugin object can serve several runs
        self.updates = 0
        self.slow: dict[str, Tensor] = {}
        if trainer.verb == "fit":
            self.slow = {name: fast.detach().clone() for name, fast in self._fast(trainer)}

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if not step.updated:
            return
        self.updates += 1
        if self.updates % self.config.every == 0:
            step.record("lookahead/distance", self._meet(step.trainer))

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "slow": dict(self.slow)}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, slow in self.slow.items():
            slow.copy_(state["slow"][name])

    @torch.no_grad()
    def _meet(self, trainer: Trainer) -> Tensor:
        """Move slow weights towards fast ones and put both there; return how far the fast ones had gone."""
        pairs = [(self.slow[name], fast) for name, fast in self._fast(trainer)]
        gone = torch.stack([torch.linalg.vector_norm(fast - slow) for slow, fast in pairs])
        for slow, fast in pairs:
            slow.lerp_(fast, self.config.alpha)
            fast.copy_(slow)
        return torch.linalg.vector_norm(gone)  # a tensor: it stays on the device until the next log

    @staticmethod
    def _fast(trainer: Trainer) -> list[tuple[str, Tensor]]:
        return [(name, weight) for name, weight in trainer.task.named_parameters() if weight.requires_grad]
