"""Lookahead (Zhang et al., 2019, https://arxiv.org/abs/1907.08610) as a forge plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import forge

__all__ = ["Lookahead"]


class Lookahead(forge.Plugin):
    """Keep slow weights that follow the optimizer's fast weights, and restart the fast weights from them.

    After every `every` updates the slow weights move by `alpha` towards the fast weights, which are then set to the
    slow ones. Skipped updates do not count. The distance covered is logged as `lookahead/distance`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: int = 5
        "Updates between two synchronisations of slow and fast weights (k in the paper)."
        alpha: float = 0.5
        "Share of the way that the slow weights move towards the fast ones, from 0 to 1."

        def __post_init__(self) -> None:
            if self.every < 1:
                raise ValueError(f"lookahead.every is {self.every}; it must be at least 1.")
            if not 0 <= self.alpha <= 1:
                raise ValueError(f"lookahead.alpha is {self.alpha:g}; it must lie between 0 and 1.")

    config: Config
    provides = ("lookahead",)
    before = ("averaged_weights",)  # plugins that average weights see them after the synchronisation

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
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
            step.record("lookahead/distance", self._synchronise(step.trainer))

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "slow": dict(self.slow)}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, slow in self.slow.items():
            slow.copy_(state["slow"][name])

    @torch.no_grad()
    def _synchronise(self, trainer: forge.Run) -> Tensor:
        """Move the slow weights, set the fast ones to them, and return the distance that the fast ones had moved."""
        pairs = [(self.slow[name], fast) for name, fast in self._fast(trainer)]
        gone = torch.stack([torch.linalg.vector_norm(fast - slow) for slow, fast in pairs])
        for slow, fast in pairs:
            slow.lerp_(fast, self.config.alpha)
            fast.copy_(slow)
        return torch.linalg.vector_norm(gone)  # a tensor: it stays on the device until the next log

    @staticmethod
    def _fast(trainer: forge.Run) -> list[tuple[str, Tensor]]:
        return [(name, weight) for name, weight in trainer.task.named_parameters() if weight.requires_grad]
