"""TensorLoader: batches gathered from tensors in memory, by one `index_select` per tensor and batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from forge.data.order import epoch_order
from forge.data.sample_rng import seeded
from forge.data.seekable_loader import SeekableLoader
from forge.env import pick_device
from forge.errors import DataError
from forge.rng import combine_seeds


class TensorLoader(SeekableLoader):
    """Batches of tensors that are already in memory, on any device.

    ::

        TensorLoader(images, labels, batch_size=64, shuffle=True)

    yields `(images[i], labels[i])`, gathered on the tensors' device; `device="cuda"` moves them there, once. The order
    of an epoch is a function of (seed, epoch); without a `seed` the loader uses the Trainer's. A batch is a copy, so it
    may be changed in place.

    `transform` maps a whole batch (its tensors as arguments) to the result. Its random numbers from python, numpy and
    torch are a function of (seed, epoch, position in the epoch), and the global generators are restored after it.
    """

    def __init__(
        self,
        *tensors: torch.Tensor,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        transform: Callable[..., Any] | None = None,
        device: str | torch.device | None = None,
    ):
        _check_tensors(tensors)
        super().__init__(len(tensors[0]), batch_size, drop_last, seed)
        if device is not None:
            place = pick_device(device)
            tensors = tuple(tensor.to(place) for tensor in tensors)
        self.device = tensors[0].device
        if any(tensor.device != self.device for tensor in tensors):
            places = ", ".join(str(tensor.device) for tensor in tensors)
            raise DataError(f"TensorLoader got tensors on different devices ({places}). Pass one: device='cuda'.")
        self.tensors, self.shuffle, self.transform = tensors, shuffle, transform
        self.order = "shuffled" if shuffle else "sequential"

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices into the tensors at these positions of an epoch."""
        if not self.shuffle:
            return list(range(self.samples)[start:stop])
        return epoch_order(self.samples, self.seed, epoch)[start:stop].tolist()

    def _batches(self, epoch: int, ranges: Iterable[tuple[int, int]]) -> Iterator[Any]:
        if self.transform is not None:
            return self._transformed(self.transform, epoch, ranges)
        return self._gathered(epoch, ranges) if self.shuffle else self._sliced(ranges)

    def _gathered(self, epoch: int, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, ...]]:
        tensors = self.tensors
        order = epoch_order(self.samples, self.seed, epoch).to(self.device)
        for first, last in ranges:
            index = order[first:last]
            yield tuple([tensor.index_select(0, index) for tensor in tensors])

    def _sliced(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, ...]]:
        tensors = self.tensors
        for first, last in ranges:
            # a copy, as of index_select: a task that changes its batch in place must not change the data
            yield tuple([tensor[first:last].clone() for tensor in tensors])

    def _transformed(
        self, transform: Callable[..., Any], epoch: int, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[Any]:
        seed, (ranges, places) = self.seed, itertools.tee(ranges)
        raw = self._gathered(epoch, ranges) if self.shuffle else self._sliced(ranges)
        for (first, _), batch in zip(places, raw, strict=True):
            with seeded(combine_seeds(seed, epoch, first), self.device):
                changed = transform(*batch)
            yield changed


def _check_tensors(tensors: tuple[Any, ...]) -> None:
    """Raise DataError for anything but tensors with samples, of one length."""
    if not tensors:
        raise DataError("TensorLoader got no tensors. Pass one or more: TensorLoader(images, labels, batch_size=64).")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            what = "a tensor without dimensions" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise DataError(
                f"TensorLoader: argument {position} is {what}. Pass tensors whose first dimension counts the samples "
                "(torch.as_tensor converts an array)."
            )
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({shape[0] for shape in shapes}) != 1:
        raise DataError(f"TensorLoader needs tensors of one length, got the shapes {shapes}.")
    if shapes[0][0] == 0:
        raise DataError(f"TensorLoader got tensors without samples, of the shapes {shapes}. Check how they were made.")
