"""Gradient clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_value_

import forge
from forge.errors import RecipeError
from forge.optim.sharded import clip_norm_, total_norm


class Clip(forge.Plugin):
    """Clip gradients before the optimizer step: by their global norm, by value, or both (norm first).

    Gradients are clipped once per update, over the parameters of the current optimizer, after they are unscaled. If
    ranks hold parts of the parameters, the norm is taken over all parts.

    When to use it: for transformers and recurrent networks, and whenever `grad_norm/before` has spikes.

    What you see: the norm before and after clipping as `grad_norm/before` and `grad_norm/after`. The values stay on the
    device until they are logged.

    ::

        forge fit quickstart -p clip clip.max_norm=0.5
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        max_norm: float | None = 1.0
        "Largest allowed global gradient norm; null: no limit."
        max_value: float | None = None
        "Largest allowed magnitude of a single gradient entry; null: no limit."
        norm_type: float = 2.0
        "Order of the norm: 2 is usual, .inf is the largest entry."

    config: Config
    provides = ("clip",)
    example = {"max_norm": 0.1}
    capturable = True
    charts = {"gradient norm/before and after clipping": r"grad_norm/.+"}

    def __init__(self, *first: float | None, **values: Any):
        super().__init__(*first, **values)
        for name in ("max_norm", "max_value"):
            limit = getattr(self.config, name)
            if limit is not None and limit <= 0:
                raise RecipeError(f"clip.{name} is {limit:g}; it must be above 0, or null for no limit.")
        if self.config.max_norm is None and self.config.max_value is None:
            raise RecipeError("clip has neither max_norm nor max_value, so it clips nothing. Set one of them.")

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        config, parameters = self.config, step.parameters()
        prefix = "grad_norm" if step.name is None else f"grad_norm/{step.name}"
        if config.max_norm is not None:
            norm = clip_norm_(parameters, config.max_norm, config.norm_type, step.trainer.env)
            if norm.is_cpu:  # a number is cheaper than one more operation
                before = float(norm)
                after = min(before, config.max_norm)
            else:
                before, after = norm, norm.clamp(max=config.max_norm)
        else:
            before = after = self._norm(step)
        if config.max_value is not None:
            clip_grad_value_(parameters, config.max_value)
            after = self._norm(step)
        step.record(f"{prefix}/before", before)
        step.record(f"{prefix}/after", after)

    def _norm(self, step: forge.Step) -> Tensor:
        gradients = [p.grad for p in step.parameters() if p.grad is not None]
        return total_norm(gradients, self.config.norm_type, step.trainer.env)
