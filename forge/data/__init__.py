"""Data: loaders whose order is a pure function of (seed, epoch), and the splits that recipes name."""

from __future__ import annotations

from forge.data.feed import Feed, batch_size, length_of
from forge.data.loader import Loader
from forge.data.order import EpochSampler, epoch_order
from forge.data.splits import Splits
from forge.data.tensor import TensorLoader

__all__ = ["EpochSampler", "Feed", "Loader", "Splits", "TensorLoader", "batch_size", "epoch_order", "length_of"]
