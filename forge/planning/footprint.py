"""Footprint: the memory of one training step on one device, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20
WORKSPACE = 64 * MIB
"""Memory that cuBLAS allocates through torch before the first product: 32 MiB on Hopper for each of the two threads
that forward and backward run in; 8 MiB each on older GPUs. cuDNN's workspaces for convolutions cannot be predicted."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The worst moment of one phase of a step."""

    total: int
    gradients: int
    "Gradients of parameters that are allocated at this moment."


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a measured step, rounded as CUDA's allocator rounds; only `peak` includes workspaces."""

    samples: int
    "Samples in a micro-batch."
    parameters: int
    "Parameters and buffers."
    buffers: int
    "The buffers among them, which no strategy divides."
    gradients: int
    optimizer: int
    activations: int
    "Tensors that a forward keeps for backward."
    moments: Mapping[str, Moment]
    "By phase: forward, backward, optimizer."
    block: int
    "Parameters of the largest repeated block; 0 without one."
    outside: int
    "Parameters outside such blocks."

    @property
    def worst(self) -> str:
        """Return the phase with the highest total."""
        return max(self.moments, key=lambda phase: self.moments[phase].total)

    @property
    def peak(self) -> int:
        """Return the expected `torch.cuda.max_memory_allocated` after some updates."""
        return self.moments[self.worst].total + WORKSPACE

    def rest(self, phase: str) -> int:
        """Return the memory of a phase beside parameters, gradients and optimizer state."""
        moment = self.moments[phase]
        return max(0, moment.total - moment.gradients - self.parameters - self.optimizer)
