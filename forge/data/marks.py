"""Marks of data: what ranks compare to see whether they read the same samples in the same order.

A mark is exact for numbers, texts and whole numbers in tensors. Floating-point tensors are compared by a projection, so
that the last bits of a decoded or resized image, which differ between kinds of processors, make no difference. Texts
are compared without what all of them begin with: the folder of the data may differ between hosts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.data.iterable import digest
from forge.data.own_generators import data_roots
from forge.rng import combine_seeds, fold
from forge.util.generators import find_generators, generator_state, seed_generator, set_generator_state

logger = logging.getLogger("forge")

Marks = dict[str, Any]
"""What was seen of a sample or a batch, by path."""

CURE = (
    "Sort what is listed, as sorted(os.listdir(folder)), sorted(glob(...)) or sorted(a_set), and seed what is shuffled "
    "or split, as random.Random(0).shuffle(files)"
)

MOST = 64
"""Samples of a loader that are compared at most; a small data set is compared whole."""
FEW = 3
"""Samples that are compared however long they take."""
SECONDS = 0.25
"""How long more than a few are read."""
MAX_PARTS = 64
MAX_TEXT = 1000
CLOSE = 1e-4


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


def word(found: Marks) -> int:
    """Return all marks as one number, which is equal where they are equal to the last bit."""
    return int.from_bytes(hashlib.sha256(repr(sorted(found.items())).encode()).digest()[:7])


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
        wanted = places(loader.peek_at)
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
