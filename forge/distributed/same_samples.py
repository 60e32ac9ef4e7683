"""The same samples in the same order on every rank: some of each loader, and the weights, are compared before a run.

Loaders that can be indexed read only the samples of their rank, so that another order of files on another rank would
show nowhere: some samples would be used twice, and others never. Other loaders are compared as they are read.

Texts and whole numbers must be equal. Floating-point numbers may differ in their last bits, as those of a decoded or
resized image do between kinds of processors. Of a path the last part is compared: the folder may differ between hosts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from forge.contract.run import Run
from forge.data.accumulation_windows import length_of
from forge.data.own_generators import data_roots
from forge.data.sharding import CURE
from forge.errors import DataError
from forge.rng import combine_seeds, fold
from forge.twin.compare import differences, first_difference, marks_of
from forge.twin.record import Mark, Record
from forge.util.digest import digest
from forge.util.generators import find_generators, generator_state, seed_generator, set_generator_state

logger = logging.getLogger("forge")

MOST = 64
"""Samples of a loader that are compared at most; a small data set is compared whole."""
FEW = 3
"""Samples that are compared however long they take."""
SECONDS = 0.25
"""How long more than a few are read."""
MAX_PARTS = 64
MAX_TEXT = 1000
CLOSE = 1e-4


def refuse_different_samples(trainer: Run) -> None:
    """Compare some samples of every loader that can be indexed with those of rank 0. All ranks must call this."""
    env = trainer.env
    if env.world == 1:
        return
    indexed: dict[str, Any] = {}
    for stage, named in trainer.loaders.items():
        for name, loader in named.items():
            indexed |= _indexed(stage if name is None else f"{stage}/{name}", loader)
    read = {name: peeked(loader) for name, loader in indexed.items()}
    all_read = env.gather({name: len(samples) for name, samples in read.items()})
    own = {name: _marks(each[: min(other.get(name, 0) for other in all_read)]) for name, each in read.items()}
    first = env.broadcast(own)
    found = {n: first_difference(Record.of(each), Record.of(first.get(n, ())), CLOSE) for n, each in own.items()}
    for rank, theirs in enumerate(env.gather(found)):
        for name, difference in theirs.items():
            if difference is not None:
                loader = indexed[name]
                index = places(_samples(loader))[difference.update]
                if hasattr(loader, "sample_indices"):
                    index = loader.sample_indices(0, index, index + 1)[0]
                raise DataError(
                    f"The {name} data of rank {rank} are not those of rank 0: the sample with index {index} is another "
                    f"one (its part {difference.path!r}). Every rank needs the same data in the same order; forge "
                    f"takes each rank's share of it. {CURE}."
                )


def tell_different_weights(trainer: Run) -> None:
    """Before a strategy makes them equal, say if ranks begin with other weights: they were not seeded alike."""
    if trainer.verb != "fit" or trainer.env.world == 1:
        return
    plain = [(n, p) for n, p in trainer.task.named_parameters() if type(p) is nn.Parameter and not is_lazy(p)]
    named = {name: p.detach() for name, p in plain if not p.is_meta}
    own = {name: digest(p.reshape(-1)[:: p.numel() // 64 + 1]) for name, p in named.items()}
    first = trainer.env.broadcast(own)
    odd = trainer.env.gather(next((name for name in own if first.get(name) != own[name]), None))
    rank = next((rank for rank, name in enumerate(odd) if name is not None), None)
    if rank is not None and trainer.env.is_main:
        logger.warning(
            f"{type(trainer.task).__name__} has other initial weights on rank {rank} than on rank 0 ({odd[rank]}): "
            "that process was not seeded as this one. Make the Trainer, with a seed, before the task."
        )


def _indexed(name: str, loader: Any) -> dict[str, Any]:
    """Return every loader inside this one whose samples can be read one by one, by name."""
    if hasattr(loader, "loaders"):
        inner = [_indexed(f"{name}/{key}", each) for key, each in loader.loaders.items()]
        return {path: found for each in inner for path, found in each.items()}
    return {name: loader} if hasattr(loader, "peek") and hasattr(loader, "iter_rank") else {}


def _samples(loader: Any) -> int:
    return loader.fingerprint().get("samples") or length_of(loader.dataset) or 0


def _marks(samples: Sequence[Sequence[Mark]]) -> list[Mark]:
    """Return the marks of some samples, each at its place."""
    return [replace(part, update=place, aside=True) for place, parts in enumerate(samples) for part in parts]


def _plain(value: Any) -> Any:
    """Return a sample as nested texts, numbers and tensors; what is long, and what else there is, by its digest."""
    if isinstance(value, np.ndarray):
        value = (
            value.tolist() if value.dtype.hasobject else torch.from_numpy(value) if value.dtype.kind == "f" else value
        )
    if isinstance(value, (Mapping, list, tuple)) and len(value) <= MAX_PARTS:
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {key: _plain(part) for key, part in parts}
    if isinstance(value, (str, os.PathLike)):
        text = str(value).rpartition("/")[2]
        return text if len(text) <= MAX_TEXT else digest(text)
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    try:
        return digest(value).encode()
    except Exception:  # a layout or type that has no plain memory: a check must not stop a run that works
        return type(value).__name__


def places(samples: int) -> list[int]:
    """Return which samples are looked at, the ends first; the same on all ranks."""
    if samples <= MOST:
        return sorted(range(samples), key=lambda place: (0 < place < samples - 1, fold(samples, place)))
    drawn = (combine_seeds(samples, number) % samples for number in range(MOST))
    return list(dict.fromkeys([0, samples - 1, *drawn]))[:MOST]


def peeked(loader: Any) -> list[list[Mark]]:
    """Return the parts of some samples of a loader with `peek`, in the order of `places`.

    Each is read twice under the same random numbers; a part that differs then has no order to compare. What the data
    draw from is left as it was. An error of the data's is left to the run, which says more about it.
    """
    found: list[list[Mark]] = []
    began = time.monotonic()
    own = [(generator, generator_state(generator)) for generator in find_generators(data_roots(loader)).values()]
    try:
        wanted = iter(places(_samples(loader)))
        while len(found) < FEW or time.monotonic() - began < SECONDS:
            now = [*islice(wanted, max(FEW, len(found)))]
            if not now:
                break
            read = _seeded(loader.peek([place for place in now for _ in range(2)]), [generator for generator, _ in own])
            for once, again in zip(read, read, strict=True):
                unsteady = {each.path for each in differences(again, once)}
                found.append([part for part in once if part.path not in unsteady])
    except Exception as error:
        logger.debug("Samples could not be compared between ranks: %s", error)
    finally:
        for generator, state in own:
            set_generator_state(generator, state)
    return found


def _seeded(values: Iterator[Any], own: list[Any]) -> Iterator[list[Mark]]:
    while True:
        for number, generator in enumerate(own):
            seed_generator(generator, fold(0, number))
        try:
            yield marks_of(_plain(next(values)))
        except StopIteration:
            return
