"""Seeding per sample: a dataset's random numbers depend on (seed, epoch, index) only.

Every generator that an augmentation may use (python's, numpy's legacy global one, torch's CPU one) is seeded before
each sample, so workers, prefetch, batch size and the place in a batch change nothing. In the main process the
generators are restored after each batch. `torch.manual_seed` is never called: it would reseed CUDA too.

Generators that the dataset, its transforms or the collate function keep are copied into each worker, where they are
seeded per sample as well. In the main process they are left alone: their state is saved in checkpoints (`Feed`).
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from forge.data.collate import pad_collate
from forge.data.sample_rng import restored_generators, seed_generators
from forge.errors import DataError
from forge.rng import combine_seeds, fold
from forge.util.generators import find_generators, seed_generator
from forge.util.tracebacks import as_text, shorten, users_line

clock = time.perf_counter
_COLLATE = 0xC011A7E
"""Makes a batch's seed differ from that of its first sample."""


class Draw(NamedTuple):
    """The request for one batch: seed and epoch travel with the indices, so persistent workers stay up to date."""

    seed: int
    epoch: int
    indices: Sequence[int]
    repeats: Sequence[int] | None = None
    "How often each index occurred earlier in the epoch, if that can happen."


def number_of(index: Any) -> int:
    """Return an index as an integer; a user's sampler may yield other keys."""
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(hashlib.sha256(repr(index).encode()).digest()[:8], "little")


def is_pure(dataset: Any) -> bool:
    """Whether a dataset is known to draw no random numbers: by `pure = True`, or as one of torch's own."""
    declared = getattr(dataset, "pure", None)
    if isinstance(declared, bool):
        return declared
    kind = type(dataset)  # a subclass may do anything in its __getitem__
    if kind is Subset:
        return is_pure(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(is_pure, dataset.datasets))
    return kind in (list, tuple, TensorDataset)


def is_pure_collate(collate: Callable[..., Any]) -> bool:
    """Whether a collate function is known to draw no random numbers: torch's, forge's, or one with `pure = True`."""
    known = collate.func if isinstance(collate, partial) else collate
    return known in (default_collate, default_convert, pad_collate) or getattr(collate, "pure", False) is True


class OwnGenerators:
    """The generators that a worker's copy of a dataset keeps; looked for at the beginning of every pass."""

    def __init__(self, **roots: Any):
        self.roots = roots
        self._pass: Any = None
        self._found: list[Any] = []

    def begin(self, number: Any) -> None:
        """Look for them, in a worker, once per pass: a worker_init_fn or the dataset may have replaced them."""
        if number != self._pass and get_worker_info() is not None:
            self._pass, self._found = number, list(find_generators(self.roots).values())

    def seed(self, word: int) -> None:
        for i, generator in enumerate(self._found):
            seed_generator(generator, fold(word, i + 1))


class Failure:
    """An error sent from a worker to the main process: its message, and the traceback as text."""

    def __init__(self, message: str, trace: str):
        self.message, self.trace = message, trace

    def reraise(self) -> NoReturn:
        error = DataError(self.message)
        error.add_note(f"In the worker:\n{self.trace}")
        raise error


def failed(message: str, error: Exception) -> Failure:
    """Raise in the main process, with the cause attached; return a `Failure` in a worker: exceptions pickle badly."""
    if get_worker_info() is None:
        line = users_line(error)
        raise DataError(f"{message} It was raised at {line}." if line else message) from error
    shorten(error)
    return Failure(message, as_text(error).rstrip())


def where() -> str:
    """Return the name of this process, for an error message."""
    worker = get_worker_info()
    return "in the main process" if worker is None else f"in worker {worker.id}"


def what(error: Exception) -> str:
    """Return an exception's type and message, as a part of a sentence."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


class Seeded(Dataset[Any]):
    """Whole batches of a map-style dataset: fetched, seeded if needed, and collated, in a worker or not."""

    def __init__(self, dataset: Any, collate: Callable[..., Any], pure: bool | None, batched: bool = True):
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self.pure = is_pure(dataset) if pure is None else pure
        self.pure_collate = pure is True or is_pure_collate(collate)
        self.spent: Tensor | None = None
        "Seconds of reading samples and of joining them into batches, shared with workers; None where nobody asks."
        self._fetch_many = getattr(dataset, "__getitems__", None) if self.pure else None
        self._own = OwnGenerators(dataset=dataset, collate=collate)

    def __getitems__(self, draw: Draw) -> Any:
        """Return one collated batch, or a `Failure` if a worker met an error."""
        if (self.pure and self.pure_collate) or get_worker_info() is not None:
            return self._batch(draw)
        with restored_generators():
            return self._batch(draw)

    def _batch(self, draw: Draw) -> Any:
        if not self.pure or not self.pure_collate:
            self._own.begin((draw.seed, draw.epoch))
        began = clock()
        samples = self._pure_samples(draw.indices) if self.pure else self._seeded_samples(draw)
        if isinstance(samples, Failure):
            return samples
        read = clock()
        batch = self._collated(samples, draw)
        if self.spent is not None:
            self.spent += torch.tensor([read - began, clock() - read])
        return batch

    def _pure_samples(self, indices: Sequence[int]) -> Any:
        if self._fetch_many is not None:
            try:
                return self._fetch_many(indices)
            except Exception as error:
                return self._failed(error, self._failing(indices))
        dataset, samples, index = self.dataset, [], -1
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:
            return self._failed(error, [index])
        return samples

    def _failing(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the index that raises when read alone; all, if none does."""
        for index in indices:
            try:
                self.dataset[index]
            except Exception:
                return [index]
        return indices

    def _seeded_samples(self, draw: Draw) -> Any:
        dataset, samples, index = self.dataset, [], -1
        epoch_word = combine_seeds(draw.seed, draw.epoch)
        try:
            for place, index in enumerate(draw.indices):
                word = fold(epoch_word, index if type(index) is int else number_of(index))
                if draw.repeats is not None and draw.repeats[place]:
                    word = fold(word, draw.repeats[place])
                seed_generators(word)
                self._own.seed(word)
                samples.append(dataset[index])
        except Exception as error:
            return self._failed(error, [index])
        return samples

    def _collated(self, samples: Any, draw: Draw) -> Any:
        try:
            if not self.pure_collate:
                word = fold(combine_seeds(draw.seed, draw.epoch, number_of(draw.indices[0])), _COLLATE)
                seed_generators(word)
                self._own.seed(word)
            return self.collate(samples if self.batched else samples[0])
        except Exception as error:
            name = getattr(self.collate, "__qualname__", type(self.collate).__name__)
            return failed(
                f"{name} could not make a batch {where()} of the samples {_short(draw.indices)} of "
                f"{type(self.dataset).__name__}: {what(error)}. {differences(samples)}"
                "For sequences of different length pass collate_fn=forge.data.pad_collate.",
                error,
            )

    def _failed(self, error: Exception, indices: Sequence[int]) -> Failure:
        one = len(indices) == 1
        return failed(
            f"{type(self.dataset).__name__} raised {what(error)} at {'sample' if one else 'one of the samples'} "
            f"{indices[0] if one else _short(indices)}, {where()}. Try dataset[{indices[0]}] by itself.",
            error,
        )


def differences(samples: Any) -> str:
    """Say which shapes met in a batch that cannot be stacked, by field of the samples."""
    fields: dict[str, dict[str, int]] = {}
    for place, sample in enumerate(samples if isinstance(samples, list) else []):
        for name, form in _forms(sample, "sample"):
            fields.setdefault(name, {}).setdefault(form, place)
    found = [f"{name} is {' and '.join(list(forms)[:3])}" for name, forms in fields.items() if len(forms) > 1]
    if not found:
        return "Do these samples have the same keys, types and shapes? "
    return f"The samples differ: {'; '.join(found[:3])}{', ...' if len(found) > 3 else ''}. "


def _forms(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the shape of each tensor or array of a sample, and the type of other values, by expression."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _forms(item, f"{name}[{key!r}]")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _forms(item, f"{name}[{i}]")
    elif hasattr(value, "shape"):
        yield name, str(tuple(value.shape))
    else:
        yield name, f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


def _short(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"[{shown}, ... {len(indices)} in all]" if len(indices) > 8 else f"[{shown}]"
