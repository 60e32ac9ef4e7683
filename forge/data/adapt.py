"""Adapt a user's loader: make it resumable if possible, else give the reason why it is not."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
)

from forge.data.accumulation_windows import batch_size, holds_dataloader, is_stateful, length_of, set_epoch
from forge.data.combined import Combined, CombinedLoader, StatefulCombined
from forge.data.iterable import StreamLoader
from forge.data.known_streams import leaves_out_samples
from forge.data.limited import Limited
from forge.data.loader import Loader
from forge.data.order import Order, Sequential, Shuffled
from forge.data.prefetch import DevicePrefetch
from forge.data.protocols import is_seekable
from forge.data.sample_rng import OwnSeed
from forge.data.sharding import RankLoader
from forge.data.user_sampler import SampledLoader
from forge.data.workers import DATA_TIMEOUT
from forge.errors import DataError
from forge.torch_internals import dataloader_iterator

logger = logging.getLogger("forge")


def adopt(loader: Any, stage: str, allow_inexact: bool = False) -> Any:
    """Return a loader that gives the same samples and, if possible, resumes exactly.

    A loader with `seek`, or with `state_dict()` and `load_state_dict(state)` that tell of the last batch handed out, is
    returned unchanged, whoever made it. A list of batches and a torch DataLoader are wrapped. For any other,
    `resumable_reason` returns why it cannot resume; with `allow_inexact` it is read again from its beginning instead,
    and the consumed batches are dropped.
    """
    if isinstance(loader, Combined):
        inner = {name: adopt(each, stage, allow_inexact) for name, each in loader.loaders.items()}
        by_state = [is_stateful(each) for each in inner.values() if not is_seekable(each)]
        return (StatefulCombined if by_state and all(by_state) else CombinedLoader)(inner, loader.mode)
    if is_seekable(loader) or is_stateful(loader):
        return _lenient(loader, allow_inexact)
    if isinstance(loader, (list, tuple)):
        _refuse_several(loader, stage)
        return BatchList(loader) if loader else loader
    adopted = _lenient(_adopt_dataloader(loader), allow_inexact) if _is_plain_dataloader(loader) else loader
    reason = resumable_reason(adopted)
    if reason is None or not allow_inexact:
        return adopted
    return Reread(adopted, stage, reason)


def _lenient(loader: Any, allow_inexact: bool) -> Any:
    if allow_inexact and isinstance(loader, StreamLoader):
        loader.allow_inexact()
    return loader


def by_name(given: Any, stage: str) -> Any:
    """Return several loaders of an evaluation as a dict, those of a list by their number, and those of training as one
    loader; anything else unchanged."""
    if stage == "train":
        return CombinedLoader(given) if isinstance(given, dict) else given
    if not isinstance(given, (list, tuple)) or not given or not all(map(is_loader, given)):
        return given
    return given[0] if len(given) == 1 else {str(number): loader for number, loader in enumerate(given)}


def is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader, rather than a batch."""
    if isinstance(item, (DataLoader, OwnSeed, SampledLoader, DevicePrefetch, Combined)) or holds_dataloader(item):
        return True
    data = (torch.Tensor, str, bytes, Mapping, list, tuple, Dataset)
    is_data = isinstance(item, data) or is_dataclass(item) or any(hasattr(item, name) for name in ("to", "__array__"))
    return hasattr(item, "__iter__") and not is_data


def _refuse_several(given: Sequence[Any], stage: str) -> None:
    """Refuse a list of train loaders, as Lightning takes: a list holds batches."""
    if given and all(map(is_loader, given)):
        count = "1 loader" if len(given) == 1 else f"{len(given)} loaders"
        names = ", ".join(f"{chr(97 + i)!r}: ..." for i in range(min(len(given), 3)))
        raise DataError(
            f"{stage} got a {type(given).__name__} of {count}, but a list must hold batches. Pass a dict: "
            f"{{{names}}} gives dicts of their batches (forge.data.CombinedLoader). Or join their datasets with "
            "torch.utils.data.ConcatDataset."
        )


def resumable_reason(loader: Any) -> str | None:
    """Return why a run over this loader cannot resume exactly, and what to use instead; None if it can."""
    name = type(loader).__name__
    if isinstance(loader, (RankLoader, Limited)):
        return resumable_reason(loader.loader)
    if isinstance(loader, Combined):
        return next((reason for inner in loader.loaders.values() if (reason := resumable_reason(inner))), None)
    if isinstance(loader, Reread):
        return loader.reason
    if is_seekable(loader) or isinstance(loader, StreamLoader):
        return None
    if is_stateful(loader):
        return _unsaved_buffer(loader)
    if isinstance(loader, DataLoader):
        return _dataloader_reason(loader)
    if isinstance(loader, Iterator):
        return f"{name} is an iterator, which can be read only once. Pass a forge.data.Loader or a list."
    return (
        f"{name} has neither seek(epoch, samples) nor state_dict() and load_state_dict(state). Give it one of them, or "
        "pass its dataset in a forge.data.Loader, a torch DataLoader or torchdata's StatefulDataLoader."
    )


def _unsaved_buffer(loader: Any) -> str | None:
    """Return why a loader whose state is that of its stream loses samples."""
    if not leaves_out_samples(loader):
        return None
    return (
        f"{type(loader).__name__} reads a stream of `datasets` that shuffles, and the stream's state leaves out the "
        "samples in its shuffle buffer: they would be lost. Pass the stream in a forge.data.Loader, which reads the "
        "epoch again."
    )


def has_single_position(loader: Any) -> bool:
    """Whether one object cannot serve two stages: it has a single position, which a validation would change."""
    if isinstance(loader, (DevicePrefetch, Limited, Reread, RankLoader)):
        return has_single_position(loader.loader)
    if isinstance(loader, Combined):
        return any(map(has_single_position, loader.loaders.values()))
    if isinstance(loader, (StreamLoader, Iterator)):
        return True
    return is_stateful(loader) and not is_seekable(loader)


def _is_plain_dataloader(loader: Any) -> bool:
    """Whether this is torch's DataLoader, or a subclass that does not change how it iterates."""
    kind = type(loader)
    own = getattr(kind, "_get_iterator", None) is dataloader_iterator
    return isinstance(loader, DataLoader) and kind.__iter__ is DataLoader.__iter__ and own


def _adopt_dataloader(given: DataLoader[Any]) -> Any:
    """Return the equivalent forge loader, or the DataLoader itself if none exists."""
    if length_of(given) == 0 or _dataloader_reason(given) is not None:
        return given
    timeout, options = given.timeout or DATA_TIMEOUT, _options(given)
    if isinstance(given.dataset, IterableDataset):
        seed = {} if given.generator is None else {"seed": given.generator.initial_seed()}
        options |= {"collate_fn": given.collate_fn, "drop_last": given.drop_last, "data_timeout": timeout, **seed}
        return Loader(given.dataset, given.batch_size, num_workers=given.num_workers, **options)
    batches: Any = given.batch_sampler  # if the user passes one, the DataLoader's own sampler and sizes mean nothing
    order = order_of(batches.sampler) if type(batches) is BatchSampler else None
    if order is None:
        return SampledLoader(given, timeout, **options)
    generator = getattr(batches.sampler, "generator", None) or given.generator
    return Loader(
        given.dataset,
        batches.batch_size,
        num_workers=given.num_workers,
        seed=None if generator is None else generator.initial_seed(),
        sampler=order,
        drop_last=batches.drop_last,
        data_timeout=timeout,
        collate_fn=given.collate_fn,
        **options,
    )


def _dataloader_reason(given: DataLoader[Any]) -> str | None:
    name = type(given).__name__
    if not _is_plain_dataloader(given):
        return f"{name} overrides __iter__. Give it state_dict() and load_state_dict(state)."
    if isinstance(given.dataset, (IterDataPipe, MapDataPipe)):
        return f"{type(given.dataset).__name__} is a DataPipe. Use a Dataset, or an IterableDataset with a state."
    if not given.in_order and given.num_workers:
        return "in_order=False gives batches in the order in which workers finish. Leave it out."
    if length_of(given) is None and not isinstance(given.dataset, IterableDataset):
        sampler = given.batch_sampler if given.batch_sampler is not None else given.sampler
        return (
            f"{type(sampler).__name__} has no length, so an epoch's order cannot be drawn in advance. Give it "
            "__len__, or use forge.data.Loader with forge.data.Weighted or forge.data.Bucketed."
        )
    return None


def _options(given: DataLoader[Any]) -> dict[str, Any]:
    """Return the options that a forge loader takes too."""
    options: dict[str, Any] = {"pin_memory": given.pin_memory}
    if given.pin_memory_device:
        options["pin_memory_device"] = given.pin_memory_device
    if given.num_workers:
        names = ("prefetch_factor", "persistent_workers", "worker_init_fn", "multiprocessing_context")
        options |= {name: getattr(given, name) for name in names}
    return options


def order_of(sampler: Any) -> Order | None:
    """Return the equivalent order of torch's samplers that use every sample once; None for any other, subclasses too:
    those are drawn whole when an epoch begins."""
    kind = type(sampler)
    if kind is SequentialSampler:
        return Sequential(len(sampler))
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return Shuffled(len(sampler))
    return None


class BatchList:
    """A list of batches: any position is a slice."""

    def __init__(self, batches: Sequence[Any]):
        self.batches = batches
        self._epoch = self._start = 0

    def set_default_seed(self, seed: int) -> None:
        """Ignore the seed: a list has its order."""

    def seek(self, epoch: int, samples: int) -> None:
        """Start the next pass at this sample, which must be the first of a batch."""
        try:
            self._start = self._edges().index(samples) if samples else 0
        except ValueError:
            raise DataError(
                f"seek: no batch of this list begins at sample {samples}. Pass the list that the run began with."
            ) from None

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning; every epoch of a list is the same."""
        self.seek(epoch, 0)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with this list."""
        edges = self._edges()
        sizes = {"batches": len(self.batches), "samples": edges[-1], "batch_size": edges[1]}
        return {"order": "list", **sizes, "seed": None, "drop_last": False}

    def position(self, epoch: int, batches: int) -> int:
        """Return how many samples the first `batches` batches hold; a batch without tensors counts as one."""
        return self._edges()[batches]

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the positions themselves."""
        return list(range(start, stop))

    def _edges(self) -> list[int]:
        return list(itertools.accumulate((batch_size(batch) or 1 for batch in self.batches), initial=0))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        return iter(self.batches[start:]) if start else iter(self.batches)


class Reread:
    """A loader that can only be read from its beginning: to resume, it is read again and consumed batches are dropped.

    Positions are counted in batches, not in samples: the size of a batch may be unknown.
    """

    def __init__(self, loader: Any, stage: str, reason: str):
        self.loader, self.stage, self.reason = loader, stage, reason
        self._batches = 0

    def set_default_seed(self, seed: int) -> None:
        """Pass the seed on if the loader takes one."""
        if hasattr(self.loader, "set_default_seed"):
            self.loader.set_default_seed(seed)

    def seek(self, epoch: int, samples: int) -> None:
        """Drop the first `samples` batches of the next pass (see `position`); its order may differ from before."""
        set_epoch(self.loader, epoch)
        self._batches = samples
        if samples:
            logger.warning(
                f"The {self.stage} loader {type(self.loader).__name__} cannot resume exactly (allow_inexact): it is "
                f"read again and its first {samples} batches are dropped. {self.reason}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch, if the loader has epochs."""
        self.seek(epoch, 0)

    def position(self, epoch: int, batches: int) -> int:
        """Return the number of batches, which is the position here."""
        return batches

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of batches; nothing else is known."""
        return {"batches": length_of(self.loader)}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        dropped, self._batches = self._batches, 0
        batches = iter(self.loader)
        return itertools.islice(batches, dropped, None) if dropped else batches
