"""Capture: the whole state of a run as plain data and tensors, taken once, at the boundary of an update."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from forge.seeding import RNGState

if TYPE_CHECKING:
    from forge.trainer import Trainer


def capture(trainer: Trainer) -> dict[str, Any]:
    """Model, optimizers, schedules, counters, RNG and every plugin's state; names are the task's own."""
    return {
        "model": trainer.task.state_dict(),
        "optimizers": trainer.optimizers.state_dict(),
        "progress": dataclasses.asdict(trainer.progress),
        "rng": RNGState.capture(trainer.env.device),
        "plugins": plugin_states(trainer),
    }


def plugin_states(trainer: Trainer) -> dict[str, Any]:
    """`forge_state_dict` of every plugin that has one, by plugin name."""
    states = {name: ask(trainer) for name, ask in trainer.stack.implementations("forge_state_dict")}
    return {name: state for name, state in states.items() if state is not None}
