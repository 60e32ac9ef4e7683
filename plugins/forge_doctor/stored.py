"""What a loader keeps in memory: its samples in the order of the dataset, and the arrays that they are read from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from forge.data.own_generators import data_roots
from forge.data.tensor import TensorLoader
from forge.rng import reseed
from forge.torch_internals import pytree
from forge.util.walk import walk

Sample = tuple[Tensor, ...]
Array = Tensor | np.ndarray

MOST_VALUES = 20_000_000
"""Values of arrays that are copied, at most."""


def indexed(loader: Any) -> Any:
    """The dataset of a loader if it is read by index, or None."""
    dataset: Any = getattr(loader, "dataset", None)
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return dataset if is_indexed and not isinstance(dataset, (IterableDataset, dict)) and len(dataset) else None


def collate_of(loader: Any) -> Any:
    """What puts the samples of a loader together, or None."""
    return data_roots(loader, "", copied=True).get(" collate_fn") if loader is not None else None


def leaves(item: Any) -> Sample:
    """The numbers of one item of a dataset as tensors, in order."""
    kinds = (Tensor, np.ndarray, np.generic, float, int)
    found = [leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, kinds)]
    return tuple(leaf.detach().cpu() if isinstance(leaf, Tensor) else torch.as_tensor(leaf) for leaf in found)


def count_of(loader: Any) -> int:
    """How many samples can be read by index."""
    if isinstance(loader, TensorLoader):
        return loader.samples
    dataset = indexed(loader)
    return 0 if dataset is None else len(dataset)


def read(loader: Any, index: int, seed: int) -> Sample:
    """Read one sample as a fit would, with this seed."""
    reseed(seed)
    if not isinstance(loader, TensorLoader):
        return leaves(loader.dataset[index])
    batch = tuple(x[index : index + 1].clone() for x in loader.tensors)
    served = leaves(loader.transform(*batch) if loader.transform is not None else batch)
    return tuple(x[0] for x in served if x.ndim and len(x) == 1)


def arrays(loader: Any) -> dict[str, Array]:
    """The arrays of numbers that a loader's dataset holds, by path; nothing if they are too many."""
    found = {
        path: value
        for path, value in walk(data_roots(loader, copied=True))
        if (isinstance(value, Tensor) and value.layout == torch.strided)
        or (isinstance(value, np.ndarray) and value.dtype.kind in "fiub")
    }
    return found if sum(_size(value) for value in found.values()) <= MOST_VALUES else {}


def _size(value: Array) -> int:
    return value.numel() if isinstance(value, Tensor) else value.size


def copied(value: Array) -> Array:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def differs(value: Array, before: Array) -> Tensor | None:
    """Where an array differs from what it was, as an array of truth values; None where all is as it was."""
    is_equal = torch.equal if isinstance(value, Tensor) else np.array_equal
    if is_equal(value, before):  # pyright: ignore[reportArgumentType]
        return None
    changes = torch.as_tensor((value != before) & ~((value != value) & (before != before)))  # pyright: ignore[reportOperatorIssue]
    return changes if bool(changes.any()) else None


def put_back(value: Array, before: Array) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(torch.as_tensor(before))
    else:
        value[...] = before


@contextmanager
def kept(*loaders: Any) -> Iterator[None]:
    """Put back what reading samples changes in the arrays of datasets."""
    held: list[tuple[Array, Array]] = []
    for loader in loaders:
        try:
            held += [(value, copied(value)) for value in arrays(loader).values()]
        except Exception:  # other people's objects
            continue
    try:
        yield
    finally:
        for value, before in held:
            try:
                if value.shape == before.shape and differs(value, before) is not None:
                    put_back(value, before)
            except Exception:  # of a kind that cannot be compared, or not be written
                continue
