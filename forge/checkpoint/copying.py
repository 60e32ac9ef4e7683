"""Copy between tensors in host memory with a few threads that synchronise once, at the end.

`Tensor.copy_` synchronises its threads after every tensor. While data workers keep the cores busy, that costs ten times
the copy itself.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

CHUNK = 2**20
MOST_THREADS = 8
"""Memory bandwidth is the limit well before."""

Pair = tuple[memoryview, memoryview]
"""Target and source, of equal length."""


def copy_bytes(pairs: list[Pair]) -> None:
    """Copy all pairs, with as many threads as torch uses."""
    pieces = deque(_cut(pairs))
    helpers: list[Future[None]] = []
    count = min(torch.get_num_threads(), MOST_THREADS, len(pieces))
    if count > 1:
        with ThreadPoolExecutor(count - 1, "forge-copy") as pool:
            with suppress(RuntimeError):  # no thread can be started: this one does all the work
                helpers.extend(pool.submit(_work, pieces) for _ in range(count - 1))
            _work(pieces)
    _work(pieces)
    for helper in helpers:
        helper.result()


def _cut(pairs: list[Pair]) -> list[Pair]:
    return [
        (target[begin : begin + CHUNK], source[begin : begin + CHUNK])
        for target, source in pairs
        for begin in range(0, len(target), CHUNK)
    ]


def _work(pieces: deque[Pair]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        np.copyto(np.asarray(target), np.asarray(source))
