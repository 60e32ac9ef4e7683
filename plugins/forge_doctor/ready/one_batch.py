"""One batch, trained on again and again: a model that can learn anything learns it by heart."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from forge.config.arguments import Plugins
from forge.contract.task import TaskModule
from forge_doctor import learning
from forge_doctor.patient import first

LEARNT = 0.03
"""The share of the first loss by which it must fall, as for the finding cannot_learn_a_batch."""


@dataclass(frozen=True)
class Curve:
    """The losses of updates on one batch."""

    losses: list[float]
    chance: float | None
    floor: float | None
    reached: float
    verdict: str
    is_learnt: bool


def one_batch(task: TaskModule, train: Any, *, plugins: Plugins, settings: dict[str, Any], updates: int = 200) -> Curve:
    """Train on the first batch of `train`, and judge the losses."""
    given = first(train, 1)[0]
    losses = learning._fit(task, [copy.deepcopy(given) for _ in range(updates)], plugins, settings)
    tail = losses[-5:]
    reached = sum(tail) / len(tail)
    is_learnt = reached == reached and reached <= losses[0] - LEARNT * abs(losses[0])
    words = f"{len(losses)} updates on one batch take its loss from {losses[0]:.4g} to {reached:.4g}"
    return Curve(losses, None, None, reached, words, is_learnt)
