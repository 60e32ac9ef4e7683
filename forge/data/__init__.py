"""Data: loaders whose order is a pure function of (seed, epoch) and that resume at any position; recipes' splits."""

from __future__ import annotations

from forge.data.accumulation_windows import Feed, batch_size, length_of
from forge.data.adapt import adopt, resumable_reason
from forge.data.collate import pad_collate
from forge.data.combined import CombinedLoader
from forge.data.environments import Environments
from forge.data.live import Rollouts
from forge.data.loader import Loader
from forge.data.order import Bucketed, Order, Weighted, epoch_order
from forge.data.prefetch import DevicePrefetch
from forge.data.replay import Replay
from forge.data.splits import Splits
from forge.data.tensor import TensorLoader
from forge.data.tokens import TokenStream

__all__ = [
    "Bucketed",
    "CombinedLoader",
    "DevicePrefetch",
    "Environments",
    "Feed",
    "Loader",
    "Order",
    "Replay",
    "Rollouts",
    "Splits",
    "TensorLoader",
    "TokenStream",
    "Weighted",
    "adopt",
    "batch_size",
    "epoch_order",
    "length_of",
    "pad_collate",
    "resumable_reason",
]
