"""Footprint: what one training step takes on one device, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20
WORKSPACE = 64 * MIB
"""What cuBLAS allocates through torch before the first product: 32 MiB on Hopper, for each of the two threads that
forward and backward run in. Older GPUs take 8 MiB each. Convolutions ask cuDNN for workspaces that no shape tells."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The worst moment of one phase of a step."""

    total: int
    gradients: int
    "Gradients of parameters that are there at this moment."


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a rehearsed step takes, rounded as CUDA's allocator rounds. Without workspaces, but for `peak`."""

    samples: int
    "Samples in a micro-batch."
    parameters: int
    "Parameters and buffers."
    buffers: int
    "The part of them that is buffers, which no strategy divides."
    gradients: int
    optimizer: int
    activations: int
    "What a forward leaves behind for backward."
    moments: Mapping[str, Moment]
    "By phase: forward, backward, optimizer."
    block: int
    "Parameters of the largest block that the task repeats, 0 where it repeats none."
    outside: int
    "Parameters in no such block."

    @property
    def worst(self) -> str:
        """The phase in which the step takes most."""
        return max(self.moments, key=lambda phase: self.moments[phase].total)

    @property
    def peak(self) -> int:
        """What `torch.cuda.max_memory_allocated` will say after some updates."""
        return self.moments[self.worst].total + WORKSPACE

    def rest(self, phase: str) -> int:
        """What there is in a phase beside parameters, gradients and optimizer state."""
        moment = self.moments[phase]
        return max(0, moment.total - moment.gradients - self.parameters - self.optimizer)
