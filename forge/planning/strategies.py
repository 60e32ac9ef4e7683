"""Strategies: the memory of a step on each of N devices, from footprints of one device.

Every combination of levers is run dry, on the whole batch and on a device's share of it. What a strategy makes of
that, its plugin says: an entry point `forge.strategies` of the plugin's name is a function of a `DryStep` that
returns rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge import registry
from forge.planning.footprint import WORKSPACE, Footprint

SINGLE = "single"

Levers = tuple[str, ...]
"""Plugins that trade compute or precision for memory."""


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy with its levers: bytes on each device."""

    strategy: str
    levers: Levers
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    "Everything else at the worst moment, workspaces included."
    peak: int
    samples: int
    "Samples in a micro-batch on each device."
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    "The plugins of the strategy, with the options that make it."
    is_estimate: bool = False
    "By formula instead of counted."
    is_last: bool = False
    "Advised only where no other strategy fits."


@dataclass(frozen=True, slots=True)
class DryStep:
    """What a strategy computes its rows from."""

    whole: Mapping[Levers, Footprint]
    "The step on the whole batch, by its levers."
    share: Mapping[Levers, Footprint]
    "The step on a device's share of the batch."
    devices: int
    frugal: Levers = ()
    "The levers that cost only compute."
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    "The plugins of the recipe, with their options."

    @property
    def least(self) -> dict[Levers, Footprint]:
        """Return the footprints of a share with all levers that cost only compute."""
        return {levers: f for levers, f in self.share.items() if set(levers) >= set(self.frugal)}

    @property
    def batch(self) -> int:
        """Return the samples of the whole batch."""
        return next(iter(self.whole.values())).samples


def rows(step: DryStep) -> list[StrategyRow]:
    """Return every strategy with all measured levers: one device, then what installed plugins offer."""
    found = [row(SINGLE, levers, f, f.moments[f.worst].total) for levers, f in step.whole.items()]
    offered = [
        made
        for name in registry.installed("strategy")
        for made in registry.call_or_leave_out("strategy", name, name, step, of=StrategyRow) or ()
    ]
    return found + sorted(offered, key=lambda made: made.is_last)


def row(name: str, levers: Levers, f: Footprint, peak: int, **more: Any) -> StrategyRow:
    """Return a row of a step that has this peak before workspaces are added."""
    parts = f.parameters, f.gradients, f.optimizer, f.activations
    peak += WORKSPACE
    held = f.parameters + f.optimizer + f.activations  # gradients are allocated as activations are freed
    return StrategyRow(name, levers, *parts, max(WORKSPACE, peak - held), peak, f.samples, **more)
