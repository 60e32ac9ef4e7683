"""TensorLoader: batches gathered from tensors that are resident in memory, one `index_select` per tensor and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from forge.data.order import EpochSampler
from forge.errors import DataError


class TensorLoader:
    """Batches of tensors that are already in memory, on any device.

    ::

        TensorLoader(images, labels, batch_size=64, shuffle=True)

    yields `(images[i], labels[i])`. The order of an epoch is a function of (seed, epoch); without a `seed` of its own
    the loader uses the Trainer's. `transform` maps a whole batch (its tensors as arguments) to what is yielded.
    """

    def __init__(
        self,
        *tensors: torch.Tensor,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        transform: Callable[..., Any] | None = None,
    ):
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise DataError(
                f"TensorLoader needs tensors of one length, got {[tuple(tensor.shape) for tensor in tensors]}."
            )
        if batch_size < 1:
            raise DataError(f"TensorLoader: batch_size is {batch_size}; it must be at least 1.")
        self.tensors, self.batch_size, self.drop_last, self.transform = tensors, batch_size, drop_last, transform
        self.sampler = EpochSampler(lengths.pop(), shuffle, seed)

    def set_default_seed(self, seed: int) -> None:
        """The seed to use where the loader was made without one; the Trainer hands on its own."""
        self.sampler.default_seed = seed

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        batches = len(self.sampler) / self.batch_size
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    def __iter__(self) -> Iterator[Any]:
        shuffled = self.sampler.order().to(self.tensors[0].device) if self.sampler.shuffle else None
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            stop = min(start + self.batch_size, len(self.sampler))
            if shuffled is None:
                batch = tuple(tensor[start:stop] for tensor in self.tensors)
            else:
                batch = tuple(tensor.index_select(0, shuffled[start:stop]) for tensor in self.tensors)
            yield self.transform(*batch) if self.transform else batch
