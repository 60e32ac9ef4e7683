"""TokenStream: windows of a memory-mapped token file, for language models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from forge.data.order import epoch_order
from forge.data.seekable_loader import SeekableLoader
from forge.errors import DataError, did_you_mean
from forge.rng import combine_seeds

Source = str | os.PathLike[str] | np.ndarray | torch.Tensor
Array = np.ndarray[Any, Any]

TOKEN_TYPES = {"uint16": "<u2", "uint32": "<u4"}
"""The types of tokens in a file, as numpy names them with their byte order."""
_MODES = ("random", "sequential", "shuffled")


class TokenStream(SeekableLoader):
    """Batches of `(inputs, targets)`, each an int64 tensor of shape (batch, window), targets shifted by one token.

    ::

        TokenStream("train.bin", window=1024, batch_size=16)
        TokenStream(["a.bin", "b.bin"], window=1024, batch_size=16, mode="shuffled")
        TokenStream("val.bin", window=1024, batch_size=16, mode="sequential")

    A file holds raw little-endian tokens of `dtype`; it is memory-mapped, and may be of any length. Several files are
    one stream in which no window crosses from one file into the next. Arrays and tensors of integers are used
    unchanged. An epoch of mode

    - `sequential` is every window, one after the other, without overlap;
    - `shuffled` is the same windows in an order that is a function of (seed, epoch);
    - `random` is windows that begin anywhere, each a function of (seed, epoch, position in the epoch); as many as fit
      without overlap, or `samples` of them.

    Without a `seed` the stream uses the Trainer's.
    """

    def __init__(
        self,
        path: Source | list[Source] | tuple[Source, ...],
        window: int,
        batch_size: int,
        *,
        mode: Literal["random", "sequential", "shuffled"] = "random",
        dtype: Literal["uint16", "uint32"] = "uint16",
        samples: int | None = None,
        drop_last: bool = False,
        seed: int | None = None,
    ):
        _check_options(window, mode, dtype, samples)
        self._sources = [_Tokens(source, dtype) for source in (path if isinstance(path, (list, tuple)) else [path])]
        if not self._sources:
            raise DataError("TokenStream got an empty list of files. Check the pattern that made it.")
        for source in self._sources:
            source.check_length(window)
        self.window, self.mode, self.order = window, mode, mode
        self.tokens = sum(source.length for source in self._sources)
        self._token_bases = _cumulated([source.length for source in self._sources])
        # the first window of each file, or in mode random the first token at which a window may begin
        fits = [source.length - window if mode == "random" else _windows(source, window) for source in self._sources]
        self._bases = _cumulated(fits)
        windows = sum(_windows(source, window) for source in self._sources)
        super().__init__(windows if samples is None else samples, batch_size, drop_last, seed)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume."""
        return {**super().fingerprint(), "window": self.window, "tokens": self.tokens, "files": len(self._sources)}

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the first tokens of the windows at these positions of an epoch, counted over all files."""
        places = range(self.samples)[start:stop]
        chosen = self._chosen(epoch, self._permutation(epoch), places.start, places.stop)
        files, starts = self._located(chosen)
        return (self._token_bases[files] + starts).tolist()

    def _batches(self, epoch: int, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        permutation = self._permutation(epoch)
        for first, stop in ranges:
            rows = self._read(self._chosen(epoch, permutation, first, stop))
            # two copies: views of one buffer would not be contiguous, and would share changes in place
            yield torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))

    def _permutation(self, epoch: int) -> Array | None:
        return epoch_order(self.samples, self.seed, epoch).numpy() if self.mode == "shuffled" else None

    def _chosen(self, epoch: int, permutation: Array | None, start: int, stop: int) -> Array:
        """Return the numbers of the windows at these positions; in mode random, of their first tokens."""
        if permutation is not None:
            return permutation[start:stop]
        positions = np.arange(start, stop, dtype=np.int64)
        if self.mode == "random":
            return _drawn(combine_seeds(self.seed, epoch), positions, int(self._bases[-1]))
        return positions

    def _located(self, chosen: Array) -> tuple[Array, Array]:
        """Return for each number its file and the first token of its window in that file."""
        files = np.searchsorted(self._bases, chosen, side="right") - 1
        within = chosen - self._bases[files]
        return files, within if self.mode == "random" else within * self.window

    def _read(self, chosen: Array) -> Array:
        """Return one row of window + 1 tokens for each number."""
        if len(self._sources) == 1:
            starts = chosen if self.mode == "random" else chosen * self.window
            return self._sources[0].rows(starts, self.window)
        files, starts = self._located(chosen)
        rows = np.empty((len(chosen), self.window + 1), np.int64)
        for file in np.unique(files):
            here = files == file
            rows[here] = self._sources[file].rows(starts[here], self.window)
        return rows


class _Tokens:
    """One file, mapped when first read in this process; or one array."""

    def __init__(self, source: Any, dtype: str):
        self.path: Path | None = None
        self._tokens: Array | None = None
        self.dtype = np.dtype(TOKEN_TYPES[dtype])
        if isinstance(source, (str, os.PathLike)):
            self.path = Path(source)
            self.length = self._length_of_file(self.path)
        else:
            self._tokens = _as_array(source)
            self.length = len(self._tokens)

    def rows(self, starts: Array, window: int) -> Array:
        """Return the tokens from each start to one past its window, one row each."""
        tokens = self._mapped() if self._tokens is None else self._tokens
        return np.lib.stride_tricks.sliding_window_view(tokens, window + 1)[starts]

    def check_length(self, window: int) -> None:
        if self.length < window + 1:
            what = "an array" if self.path is None else f"{str(self.path)!r}"
            raise DataError(
                f"TokenStream: {what} has {self.length} tokens; a window of {window} needs {window + 1}, because "
                "targets are shifted by one. Take a smaller window, or join short files."
            )

    def _length_of_file(self, path: Path) -> int:
        if not path.is_file():
            raise DataError(f"TokenStream: no file {str(path)!r}. Check the path and the working directory.")
        size, rest = divmod(path.stat().st_size, self.dtype.itemsize)
        if rest:
            raise DataError(
                f"TokenStream: {str(path)!r} has {path.stat().st_size} bytes, no whole number of {self.dtype.itemsize}-"
                f"byte tokens. Was it cut short, does it have a header, or is its dtype not {self.dtype.name}?"
            )
        return size

    def _mapped(self) -> Array:
        assert self.path is not None
        if self._length_of_file(self.path) != self.length:
            raise DataError(f"TokenStream: {str(self.path)!r} changed its size since it was opened. Open it again.")
        self._tokens = np.memmap(self.path, self.dtype, mode="r").view(np.ndarray)
        return self._tokens

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the mapping, which would be a copy of the file."""
        return self.__dict__ | ({} if self.path is None else {"_tokens": None})


def _drawn(key: int, positions: Array, places: int) -> Array:
    """Return for each position a number below `places`, by hashing (splitmix64): any position costs the same."""
    mixed = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(places)).astype(np.int64)


def _windows(source: _Tokens, window: int) -> int:
    """Return how many windows fit without overlap; the last token is a target only."""
    return (source.length - 1) // window


def _cumulated(counts: list[int]) -> Array:
    return np.cumsum([0, *counts], dtype=np.int64)


def _as_array(source: Any) -> Array:
    if isinstance(source, torch.Tensor) and source.device.type == "cpu":
        source = source.detach().numpy()
    if not isinstance(source, np.ndarray) or source.ndim != 1 or source.dtype.kind not in "iu":
        shape = getattr(source, "shape", None)
        what = type(source).__name__ + ("" if shape is None else f" of {source.dtype} with shape {tuple(shape)}")
        raise DataError(
            f"TokenStream takes paths, or one-dimensional arrays or host tensors of integers; it got a {what}."
        )
    return source


def _check_options(window: int, mode: str, dtype: str, samples: int | None) -> None:
    if window < 1:
        raise DataError(f"TokenStream: window is {window}; it must be at least 1.")
    if mode not in _MODES:
        raise DataError(f"TokenStream: unknown mode {mode!r}.{did_you_mean(mode, _MODES)}")
    if dtype not in TOKEN_TYPES:
        raise DataError(f"TokenStream: dtype {dtype!r} is not supported.{did_you_mean(dtype, TOKEN_TYPES)}")
    if samples is not None and mode != "random":
        raise DataError(f"TokenStream: samples is for mode='random'; an epoch of mode={mode!r} is every window once.")
    if samples is not None and samples < 1:
        raise DataError(f"TokenStream: samples is {samples}; it must be at least 1.")
