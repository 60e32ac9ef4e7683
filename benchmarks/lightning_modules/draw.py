"""Data that is drawn, the same in every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


class Dicts(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples as dicts of tensors."""

    def __init__(self, **tensors: torch.Tensor):
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.tensors.items()}


class Batches:
    """Batches that are there already; Lightning takes a list for several loaders."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader(*tensors: torch.Tensor, batch_size: int = 8, **named: torch.Tensor) -> DataLoader[Any]:
    """A loader over tensors, or over dicts of named ones."""
    return DataLoader(Dicts(**named) if named else TensorDataset(*tensors), batch_size=batch_size)
