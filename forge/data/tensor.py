"""TensorLoader: batches gathered from tensors that are resident in memory, one `index_select` per tensor and batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from forge.data.order import epoch_order
from forge.env import pick_device
from forge.errors import DataError
from forge.seeding import RNGState

_MASK = 2**64 - 1


def mix(*parts: int) -> int:
    """One 64-bit number out of several integers, each bit of which depends on all of them (splitmix64, chained)."""
    mixed = 0
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


class SeekableLoader:
    """What loaders over a known number of samples share: seed, epoch, the place to begin, and the count of batches.

    A subclass sets `order` and gives `_batches(epoch, start)` and `sample_indices(epoch, start, stop)`.
    """

    order: str
    "The kind of order, for the fingerprint."

    def __init__(self, samples: int, batch_size: int, drop_last: bool, seed: int | None):
        name = type(self).__name__
        if batch_size < 1:
            raise DataError(f"{name}: batch_size is {batch_size}; it must be at least 1.")
        if drop_last and samples < batch_size:
            raise DataError(
                f"{name}: {samples} samples are less than one batch of {batch_size}, and drop_last drops it. "
                "Take a smaller batch_size, or leave drop_last off."
            )
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last
        self.own_seed, self.default_seed = seed, 0
        self._epoch, self._start = 0, 0

    @property
    def seed(self) -> int:
        """The loader's own seed, or the Trainer's."""
        return self.default_seed if self.own_seed is None else self.own_seed

    def set_default_seed(self, seed: int) -> None:
        """The seed to use where the loader was made without one; the Trainer hands on its own."""
        self.default_seed = seed

    def set_epoch(self, epoch: int) -> None:
        """The next iteration gives this epoch from its beginning."""
        self.seek(epoch, 0)

    def seek(self, epoch: int, samples: int) -> None:
        """The next iteration gives epoch `epoch` from its sample number `samples` on; those after it, whole epochs."""
        if epoch < 0 or not 0 <= samples <= self.samples:
            raise DataError(
                f"{type(self).__name__} cannot seek to sample {samples} of epoch {epoch}: an epoch has {self.samples} "
                "samples. Is this the data that the run was started with?"
            )
        self._epoch, self._start = epoch, samples

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a run to be continued."""
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "order": self.order,
            "drop_last": self.drop_last,
        }

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0  # taken here and not at the first batch: seek may be called in between
        return self._batches(self._epoch, start)

    def _starts(self, start: int) -> range:
        """The position of the first sample of each batch from `start` on."""
        stop = self.samples
        if self.drop_last:
            stop = start + (stop - start) // self.batch_size * self.batch_size
        return range(start, stop, self.batch_size)

    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        raise NotImplementedError


class TensorLoader(SeekableLoader):
    """Batches of tensors that are already in memory, on any device.

    ::

        TensorLoader(images, labels, batch_size=64, shuffle=True)

    yields `(images[i], labels[i])`, gathered where the tensors live; `device="cuda"` moves them there, once. The order
    of an epoch is a function of (seed, epoch); without a `seed` of its own the loader uses the Trainer's. A batch is a
    copy, so it may be changed in place.

    `transform` maps a whole batch (its tensors as arguments) to what is yielded. Whatever random numbers it draws from
    python, numpy or torch are a function of (seed, epoch, position in the epoch), and the global generators are put
    back after it.
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
            raise DataError(f"TensorLoader got tensors on different devices ({places}). Say where: device='cuda'.")
        self.tensors, self.shuffle, self.transform = tensors, shuffle, transform
        self.order = "shuffled" if shuffle else "sequential"

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """The indices into the tensors at these positions of an epoch."""
        if not self.shuffle:
            return list(range(self.samples)[start:stop])
        return epoch_order(self.samples, self.seed, epoch)[start:stop].tolist()

    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        raw = self._gathered(epoch, start) if self.shuffle else self._sliced(start)
        return raw if self.transform is None else self._transformed(raw, self.transform, epoch, start)

    def _gathered(self, epoch: int, start: int) -> Iterator[tuple[torch.Tensor, ...]]:
        tensors, size = self.tensors, self.batch_size
        order = epoch_order(self.samples, self.seed, epoch).to(self.device)
        for first in self._starts(start):
            index = order[first : first + size]
            yield tuple([tensor.index_select(0, index) for tensor in tensors])

    def _sliced(self, start: int) -> Iterator[tuple[torch.Tensor, ...]]:
        tensors, size = self.tensors, self.batch_size
        for first in self._starts(start):
            # copied, as by index_select: a task that changes its batch in place must not change the data
            yield tuple([tensor[first : first + size].clone() for tensor in tensors])

    def _transformed(
        self, raw: Iterator[tuple[torch.Tensor, ...]], transform: Callable[..., Any], epoch: int, start: int
    ) -> Iterator[Any]:
        seed = self.seed
        for first, batch in zip(self._starts(start), raw, strict=True):
            with seeded(mix(seed, epoch, first), self.device):
                changed = transform(*batch)
            yield changed


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, every generator that user code may draw from is seeded; after it, all are as they were before."""
    kept = RNGState.capture(device)
    try:
        random.seed(seed)
        np.random.seed(seed >> 32)  # numpy and torch share an algorithm: with other bits they give other numbers
        torch.default_generator.manual_seed(seed & 0xFFFFFFFF)  # torch.manual_seed would reseed every accelerator too
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        yield
    finally:
        kept.restore(device)


def _check_tensors(tensors: tuple[Any, ...]) -> None:
    """Refuse what cannot be gathered from."""
    if not tensors:
        raise DataError("TensorLoader got no tensors. Pass one or more: TensorLoader(images, labels, batch_size=64).")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            what = "a tensor without dimensions" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise DataError(
                f"TensorLoader: argument {position} is {what}. Pass tensors whose first dimension counts the samples "
                "(torch.as_tensor makes one of an array)."
            )
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({shape[0] for shape in shapes}) != 1:
        raise DataError(f"TensorLoader needs tensors of one length, got the shapes {shapes}.")
    if shapes[0][0] == 0:
        raise DataError(f"TensorLoader got tensors without samples, of the shapes {shapes}. Check how they were made.")
