"""Loader: torch's DataLoader over any map-style dataset, with an order that is a function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from forge.data.order import EpochSampler
from forge.errors import DataError


class Loader:
    """A DataLoader that never touches the global RNG and whose shuffle can be repeated.

    Options beyond these (`num_workers`, `collate_fn`, `pin_memory`, ...) are torch.utils.data.DataLoader's own. Without
    a `seed` the loader uses the Trainer's. `persistent_workers` is on wherever there are workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        num_workers: int = 0,
        *,
        seed: int | None = None,
        **options: Any,
    ):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(
                f"forge.data.Loader needs a dataset with a length and indices; {type(dataset).__name__} has none. "
                "Pass a torch DataLoader over it instead."
            )
        for key in ("sampler", "batch_sampler", "generator"):
            if key in options:
                raise DataError(f"forge.data.Loader makes its own {key}; use a torch DataLoader to bring yours.")
        if num_workers:
            options.setdefault("persistent_workers", True)
        self.dataset, self.batch_size = dataset, batch_size
        self.sampler = EpochSampler(len(dataset), shuffle, seed)  # pyright: ignore[reportArgumentType]
        # a generator of its own: iter(DataLoader) would draw its workers' base seed from the global RNG
        self._generator = torch.Generator()
        self.loader = DataLoader(
            dataset, batch_size, sampler=self.sampler, num_workers=num_workers, generator=self._generator, **options
        )

    def set_default_seed(self, seed: int) -> None:
        """The seed to use where the loader was made without one; the Trainer hands on its own."""
        self.sampler.default_seed = seed

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._generator.manual_seed((self.sampler.seed * 1_000_003 + self.sampler.epoch) % 2**63)
        return iter(self.loader)
