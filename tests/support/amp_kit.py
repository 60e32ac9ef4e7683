"""What the tests of amp share."""

from __future__ import annotations

from typing import Any

import forge
from forge.testing import fit_tiny
from forge_plugins import AMP

HIGH = {"init_scale": 2.0**20, "growth_interval": 2}
"""A scale that overflows at once, comes down, and tries again every other update."""


def made(dtype: str) -> AMP:
    return AMP(dtype, **HIGH) if dtype == "fp16" else AMP(dtype)


class Scales(forge.Plugin):
    """The scale after every update; stands behind amp."""

    observer = True

    def __init__(self, amp: AMP):
        super().__init__()
        self.amp, self.seen = amp, []

    @forge.hookimpl
    def forge_boundary(self) -> None:
        self.seen.append(1.0 if self.amp.scaler is None else self.amp.scaler.get_scale())


def trained(task: Any, amp: AMP, *others: forge.Plugin, **options: Any) -> list[float]:
    scales = Scales(amp)
    fit_tiny([*others, amp, scales], task=task, **options)
    return scales.seen
