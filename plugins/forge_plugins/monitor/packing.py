"""Numbers packed as one tensor, so that one copy brings them from the device to the host, without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

import forge

BINS = 64
LARGEST = 1 << 22
"""Larger tensors are subsampled evenly: a histogram needs several times the memory of its input."""
Contents = dict[str, list[float]]
"""The numbers of each tensor, flat."""


class PackedCopy:
    """Many small named tensors of several senders, in one copy."""

    def __init__(self, senders: Sequence[Mapping[str, Tensor]], device: torch.device):
        self._names = [[(name, tensor.numel()) for name, tensor in sender.items()] for sender in senders]
        parts = [tensor for sender in senders for tensor in sender.values()]
        self._packed = stacked(parts, device) if parts else torch.empty(0)
        self._arrived: torch.cuda.Event | None = None
        if self._packed.is_cuda:
            pinned = torch.empty(self._packed.shape, dtype=torch.float32, pin_memory=True)
            pinned.copy_(self._packed, non_blocking=True)
            self._packed, self._arrived = pinned, torch.cuda.Event()
            self._arrived.record()
        self.here = self._arrived is None and self._packed.is_cpu
        "Whether `open` does not wait."

    def open(self) -> list[Contents]:
        """Return the contents of every sender."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = iter(self._packed.tolist())
        return [{name: list(islice(numbers, count)) for name, count in names} for names in self._names]


def stacked(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return tensors of any device as one vector."""
    return torch.cat([tensor.reshape(-1).to(device, torch.float32, non_blocking=True) for tensor in tensors])


def histogram(values: Tensor) -> Tensor:
    """Return the histogram of a tensor as one vector, on its device."""
    flat = values.detach().reshape(-1)
    stride = -(-flat.numel() // LARGEST)
    drawn = forge.Histogram.of(flat[:: stride | 1], BINS)  # an odd stride does not stay in a few columns
    return torch.cat([drawn.counts, drawn.edges])


def unpacked(numbers: list[float]) -> forge.Histogram:
    """Return what `histogram` made, on the host."""
    return forge.Histogram(torch.tensor(numbers[:BINS]), torch.tensor(numbers[BINS:]))
