"""Feed: windows of batches out of any loader, epoch after epoch.

A loader is anything that can be iterated: a DataLoader, a forge loader, a list of batches, an object with `__iter__`.
The feed knows before a window's first backward how long the window is and whether it ends the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset

from forge.errors import DataError


def length_of(loader: Any) -> int | None:
    """How many batches a loader says it gives, or None if it does not know."""
    try:
        return len(loader)
    except TypeError:  # no __len__, or a DataLoader over an IterableDataset without one
        return None


def batch_size(batch: Any) -> int | None:
    """The number of samples in a batch: the first dimension of the first tensor found in it, or None."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # these are always on the host
    if isinstance(batch, (tuple, list)):
        parts = batch
    elif isinstance(batch, torch.Tensor):
        parts = (batch,)
    elif isinstance(batch, Mapping):
        parts = batch.values()
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    else:
        return None
    for part in parts:
        if isinstance(part, torch.Tensor):
            if part.ndim:
                return part.size(0)
        elif (size := batch_size(part)) is not None:
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
    """Windows of batches from a training loader."""

    def __init__(self, loader: Any):
        check_loader(loader, "train")
        self.loader = loader
        self.length = length_of(loader)
        self._used_up = False

    def epoch(self, number: int, plan: Callable[[], int]) -> Iterator[tuple[list[Any], bool]]:
        """The windows of one epoch: (batches, whether this is the last). `plan` says how many batches come next.

        A window is shorter than planned only at the end, and never empty. A loader without a length is read one batch
        ahead; one with a length is not, so no sample is drawn before its turn.
        """
        batches, length, given = self._start(number), self.length, 0
        ahead: list[Any] = []
        last = False
        while not last:
            window, ahead = ahead, []
            count = plan() if length is None else min(plan(), length - given)
            if count < 1:
                raise DataError(f"forge_plan_step asked for a window of {count} micro-batches; it must be at least 1.")
            try:
                while len(window) < count:
                    window.append(next(batches))
            except StopIteration as stop:
                self._refuse_short_epoch(given + len(window), stop)
            given += len(window)
            if length is None or given == length:
                last = not self._look_ahead(batches, ahead)
            yield window, last

    def _start(self, number: int) -> Iterator[Any]:
        """Tell the loader, or its sampler, which epoch begins; then begin it."""
        set_epoch(self.loader, number)
        batches = iter(self.loader)
        if batches is self.loader and self._used_up:
            raise DataError(
                f"train is a one-shot iterator ({type(self.loader).__name__}) and its one epoch is used up. Pass a "
                "loader or a list that can be iterated again, or set max_epochs=1."
            )
        self._used_up = True
        return batches

    def _look_ahead(self, batches: Iterator[Any], ahead: list[Any]) -> bool:
        """Whether there is another batch; it is kept in `ahead`."""
        try:
            ahead.append(next(batches))
        except StopIteration:
            return False
        if self.length is not None:
            raise DataError(
                f"The train loader gave more than the {self.length} batches that its length says. "
                "Mend its __len__, or remove it for an endless stream."
            )
        return True

    def _refuse_short_epoch(self, given: int, stop: StopIteration) -> None:
        if self.length is not None:
            raise DataError(
                f"The train loader gave {given} batches in this epoch, but its length says {self.length}. "
                f"Mend its __len__{_raised_by(stop)}."
            ) from stop
        if given == 0:
            raise DataError("The train loader gave no batch in this epoch. Check its dataset, sampler and drop_last.")


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
    if trace is None or trace.tb_frame.f_code is Feed.epoch.__code__:
        return ""
    code = trace.tb_frame.f_code
    return f", or mend {code.co_qualname} ({code.co_filename}:{trace.tb_lineno}), which raised StopIteration"
