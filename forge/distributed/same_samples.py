"""The same samples in the same order on every rank: some of each loader, and the weights, are compared before a run.

Loaders that can be indexed read only the samples of their rank, so that another order of files on another rank would
show nowhere: some samples would be used twice, and others never. Other loaders are compared as they are read.

What is compared are marks. A mark is exact for numbers, texts and whole numbers in tensors. Floating-point tensors are
compared by a projection, so that the last bits of a decoded or resized image, which differ between kinds of processors,
make no difference. Texts are compared without what all of them begin with: the folder may differ between hosts.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from forge.contract.run import Run
from forge.data.accumulation_windows import length_of
from forge.data.batch_digest import digest
from forge.data.own_generators import data_roots
from forge.data.sharding import CURE
from forge.errors import DataError
from forge.rng import combine_seeds, fold
from forge.util.generators import find_generators, generator_state, seed_generator, set_generator_state

logger = logging.getLogger("forge")

Marks = dict[str, Any]
"""What was seen of a sample or a batch, by path."""

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
    own = {name: peeked(loader) for name, loader in indexed.items()}
    first = env.broadcast(own)
    found = {name: difference(first.get(name, ()), each) for name, each in own.items()}
    for rank, theirs in enumerate(env.gather(found)):
        for name, place in theirs.items():
            if place is not None:
                loader = indexed[name]
                index = places(_samples(loader))[place[0]]
                if hasattr(loader, "sample_indices"):
                    index = loader.sample_indices(0, index, index + 1)[0]
                raise DataError(
                    f"The {name} data of rank {rank} are not those of rank 0: the sample with index {index} is another "
                    f"one (its part {place[1]}). Every rank needs the same data in the same order; forge takes each "
                    f"rank's share of it. {CURE}."
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


def marks(value: Any, path: str = "") -> Marks:
    """Return the marks of every part of a sample or batch."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()
    if isinstance(value, (Mapping, list, tuple)) and len(value) <= MAX_PARTS:
        found: Marks = {f"{path}(length)": len(value)}
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            found |= marks(part, f"{path}[{key!r}]")
        return found
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and len(value) <= MAX_TEXT:
        return {path: value}
    try:
        return {path: _projected(value) or (digest(value),)}
    except Exception:  # a layout or type that has no plain memory: a check must not stop a run that works
        return {path: (type(value).__name__,)}


def _projected(value: Any) -> tuple[str, float, float] | None:
    """Return the shape of a floating-point tensor or array, its sum under fixed random weights, and its norm."""
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    flat = value.detach().cpu().double().nan_to_num().reshape(-1)
    weights = torch.randn(flat.numel(), generator=torch.Generator().manual_seed(flat.numel()), dtype=torch.float64)
    return f"{value.dtype} {tuple(value.shape)}", float(flat @ weights), float(flat.norm())


def difference(theirs: Sequence[Marks], ours: Sequence[Marks]) -> tuple[int, str] | None:
    """Return the first place that both have seen and that differs, and the path of a part of it."""
    pairs = list(zip(theirs, ours, strict=False))
    shared = [(place, path) for place, (a, b) in enumerate(pairs) for path in a if path in b]
    texts: dict[str, list[tuple[str, str]]] = {}
    for place, path in shared:
        a, b = (side[path] for side in pairs[place])
        if isinstance(a, str) and isinstance(b, str):
            texts.setdefault(_field(path), []).append((a, b))
    roots = {path: [_root(side) for side in zip(*each, strict=True)] for path, each in texts.items()}
    for place, path in shared:
        a, b = (side[path] for side in pairs[place])
        if isinstance(a, str) and isinstance(b, str):
            a, b = (text[cut:] for text, cut in zip((a, b), roots[_field(path)], strict=True))
        if a != b and not _close(a, b):
            return place, path
    return None


def _root(texts: Sequence[str]) -> int:
    """Return how long the beginning is that several texts share."""
    return len(os.path.commonprefix(texts)) if len(texts) > 1 else 0  # noqa: RUF071  names share letters, not folders


def _field(path: str) -> str:
    """Return the path of the list in which a value is, as a batch has one text per sample; else its own."""
    return re.sub(r"\[\d+\]$", "", path)


def _close(a: Any, b: Any) -> bool:
    if not (isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 3 and a[0] == b[0]):
        return False
    return abs(a[1] - b[1]) <= CLOSE * max(a[2], b[2])


def places(samples: int) -> list[int]:
    """Return which samples are looked at, the ends first; the same on all ranks."""
    if samples <= MOST:
        return sorted(range(samples), key=lambda place: (0 < place < samples - 1, fold(samples, place)))
    drawn = (combine_seeds(samples, number) % samples for number in range(MOST))
    return list(dict.fromkeys([0, samples - 1, *drawn]))[:MOST]


def peeked(loader: Any) -> list[Marks]:
    """Return the marks of some samples of a loader with `peek`, in the order of `places`.

    Each is read twice under the same random numbers; a part that differs then has no order to compare. What the data
    draw from is left as it was. An error of the data's is left to the run, which says more about it.
    """
    found: list[Marks] = []
    began = time.monotonic()
    own = [(generator, generator_state(generator)) for generator in find_generators(data_roots(loader)).values()]
    try:
        wanted = places(_samples(loader))
        while wanted and (len(found) < FEW or time.monotonic() - began < SECONDS):
            now, wanted = wanted[: max(FEW, len(found))], wanted[max(FEW, len(found)) :]
            read = _seeded(loader.peek([place for place in now for _ in range(2)]), [generator for generator, _ in own])
            for once, again in zip(read, read, strict=True):
                found.append({path: mark for path, mark in once.items() if again.get(path) == mark})
    except Exception as error:
        logger.debug("Samples could not be compared between ranks: %s", error)
    finally:
        for generator, state in own:
            set_generator_state(generator, state)
    return found


def _seeded(values: Iterator[Any], own: list[Any]) -> Iterator[Marks]:
    while True:
        for number, generator in enumerate(own):
            seed_generator(generator, fold(0, number))
        try:
            yield marks(next(values))
        except StopIteration:
            return
