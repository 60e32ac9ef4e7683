"""Feed: windows of batches out of any loader, epoch after epoch.

A loader is anything that can be iterated: a DataLoader, a forge loader, a list of batches, an object with `__iter__`.
The feed knows before a window's first backward how long the window is and whether it ends the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from forge.errors import DataError

_NOTHING: Any = object()


def length_of(loader: Any) -> int | None:
    """How many batches a loader says it gives, or None if it does not know."""
    try:
        return len(loader)
    except TypeError:  # no __len__, or a DataLoader over an IterableDataset without one
        return None


def batch_size(batch: Any) -> int | None:
    """The number of samples in a batch: the first dimension of the first tensor found in it, or None."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, (list, tuple)):
        parts = batch
    elif isinstance(batch, dict):
        parts = batch.values()
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    else:
        return None
    for part in parts:
        size = batch_size(part)
        if size is not None:
            return size
    return None


def count_samples(window: list[Any], items: list[Any]) -> int:
    """Samples in a window whose task weighs batches by something else; a batch of unknown size counts its items."""
    counted = 0
    for batch, n in zip(window, items, strict=True):
        size = batch_size(batch)
        if size is None and isinstance(n, int):  # a tensor is not read for this
            size = n
        counted += size or 0
    return counted


def check_loader(loader: Any, stage: str) -> None:
    """Refuse what cannot feed a stage, by name."""
    if isinstance(loader, Dataset):
        raise DataError(
            f"{stage} got the dataset {type(loader).__name__} itself. Wrap it in a loader: "
            f"forge.data.Loader({type(loader).__name__.lower()}, batch_size=..., shuffle={stage == 'train'})."
        )
    if not hasattr(loader, "__iter__"):
        raise DataError(f"{stage} got a {type(loader).__name__}, which cannot be iterated. Pass a loader.")
    if length_of(loader) == 0:
        raise DataError(f"The {stage} loader is empty: it has no batch to give.")


class Feed:
    """Takes windows from a training loader."""

    def __init__(self, loader: Any):
        check_loader(loader, "train")
        self.loader = loader
        self.length = length_of(loader)
        self.ends_epoch = False
        "Whether the window taken last was the last of its epoch."
        self._iterator: Iterator[Any] | None = None
        self._given = 0
        self._ahead: Any = _NOTHING
        self._used_up = False

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch: tell the loader, or its sampler, which one it is."""
        set_epoch(self.loader, epoch)
        iterator = iter(self.loader)
        if iterator is self.loader and self._used_up:
            raise DataError(
                f"train is a one-shot iterator ({type(self.loader).__name__}) and its one epoch is used up. Pass a "
                "loader or a list that can be iterated again, or set max_epochs=1."
            )
        self._iterator, self._given, self._ahead, self.ends_epoch = iterator, 0, _NOTHING, False
        self._used_up = True

    def take(self, count: int, epoch: int) -> list[Any]:
        """The next window of up to `count` batches; it is shorter only at an epoch's end, and never empty."""
        if self._iterator is None:
            self.start_epoch(epoch)
        if self.length is not None:
            count = min(count, self.length - self._given)
        window = []
        while len(window) < count:
            batch = self._next()
            if batch is _NOTHING:
                break
            window.append(batch)
        if not window:
            raise DataError("The train loader gave no batch in this epoch. Check its dataset, sampler and drop_last.")
        self._settle()
        return window

    def _next(self) -> Any:
        if self._ahead is not _NOTHING:
            batch, self._ahead = self._ahead, _NOTHING
            return batch
        try:
            batch = next(self._iterator)  # pyright: ignore[reportArgumentType]
        except StopIteration as stop:
            if self.length is not None and self._given < self.length:
                raise DataError(
                    f"The train loader gave {self._given} batches in this epoch, but its length says {self.length}. "
                    f"Mend its __len__{_raised_by(stop)}."
                ) from stop
            return _NOTHING
        self._given += 1
        return batch

    def _settle(self) -> None:
        """Find out whether the epoch is over. A known length needs no look ahead, so no sample is drawn early."""
        if self.length is not None and self._given < self.length:
            return
        self._ahead = self._next()
        if self._ahead is _NOTHING:
            self.ends_epoch, self._iterator = True, None
        elif self.length is not None:
            raise DataError(
                f"The train loader gave more than the {self.length} batches that its length says. "
                "Mend its __len__, or remove it for an endless stream."
            )


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, or the sampler inside a DataLoader, which epoch begins."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for candidate in (loader, sampler, inner):
        if hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess]
            return


def _raised_by(stop: StopIteration) -> str:
    """Where a StopIteration came from, when it was raised inside user code rather than by the iterator's end."""
    trace = stop.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code is Feed._next.__code__:
        return ""
    code = trace.tb_frame.f_code
    return f", or mend {code.co_qualname} ({code.co_filename}:{trace.tb_lineno}), which raised StopIteration"
