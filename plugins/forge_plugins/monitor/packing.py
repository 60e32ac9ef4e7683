"""Numbers packed as one tensor, so that one copy brings them from the device to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import torch
from torch import Tensor

import forge

BINS = 64
LARGEST = 1 << 22
"""Larger tensors are subsampled evenly: a histogram needs several times the memory of its input."""
Contents = dict[str, list[float]]
"""The numbers of each tensor, flat."""


def read(tensors: Mapping[str, Tensor], device: torch.device) -> Contents:
    """Return the contents of small tensors: one copy from the device to the host."""
    numbers = iter(stacked(tensors.values(), device).tolist() if tensors else ())
    return {name: list(islice(numbers, tensor.numel())) for name, tensor in tensors.items()}


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
