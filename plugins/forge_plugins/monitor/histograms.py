"""Histograms that travel in a parcel."""

from __future__ import annotations

import torch
from torch import Tensor

import forge

BINS = 64
LARGEST = 1 << 22
"""A larger tensor is thinned evenly: a histogram needs several times the memory of what it counts."""


def packed(values: Tensor) -> Tensor:
    """The histogram of a tensor in one vector, on its device."""
    flat = values.detach().reshape(-1)
    stride = -(-flat.numel() // LARGEST)
    drawn = forge.Histogram.of(flat[:: stride | 1], BINS)  # an odd stride does not stay in a few columns
    return torch.cat([drawn.counts, drawn.edges])


def unpacked(numbers: list[float]) -> forge.Histogram:
    """What `packed` made, on the host."""
    return forge.Histogram(torch.tensor(numbers[:BINS]), torch.tensor(numbers[BINS:]))
