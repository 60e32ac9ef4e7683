"""Histograms packed as one vector."""

from __future__ import annotations

import torch
from torch import Tensor

import forge

BINS = 64
LARGEST = 1 << 22
"""Larger tensors are subsampled evenly: a histogram needs several times the memory of its input."""


def packed(values: Tensor) -> Tensor:
    """Return the histogram of a tensor as one vector, on its device."""
    flat = values.detach().reshape(-1)
    stride = -(-flat.numel() // LARGEST)
    drawn = forge.Histogram.of(flat[:: stride | 1], BINS)  # an odd stride does not stay in a few columns
    return torch.cat([drawn.counts, drawn.edges])


def unpacked(numbers: list[float]) -> forge.Histogram:
    """Return the histogram that `packed` made, on the host."""
    return forge.Histogram(torch.tensor(numbers[:BINS]), torch.tensor(numbers[BINS:]))
