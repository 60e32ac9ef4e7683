"""CombinedLoader: several loaders as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from forge.data.accumulation_windows import length_of, set_epoch
from forge.data.sharding import Portion, RankLoader
from forge.errors import DataError, did_you_mean
from forge.rng import combine_seeds

Mode = Literal["max_size_cycle", "max_size", "min_size", "sequential"]


class CombinedLoader:
    """Several loaders as one, whose batches are dicts of their batches by name.

    ::

        CombinedLoader({"labelled": labelled, "unlabelled": unlabelled}, mode="min_size")

    `mode` says how long an epoch is: `max_size_cycle` as the longest loader, while the others begin again, with
    another order; `max_size` as the longest, with None for a loader that has ended; `min_size` as the shortest;
    `sequential` reads one loader after the other, and gives their batches themselves. The modes are those of Lightning.

    `fit` makes one of a dict of train loaders. All loaders need a length. The position in each follows from the number
    of batches, so a run resumes exactly if it would with each of the loaders.
    """

    def __init__(self, loaders: Mapping[str, Any], mode: Mode = "max_size_cycle"):
        if mode not in get_args(Mode):
            raise DataError(f"CombinedLoader: {mode!r} is no mode.{did_you_mean(mode, get_args(Mode))}")
        if not loaders:
            raise DataError("CombinedLoader: no loaders were given.")
        for name, loader in loaders.items():
            if not length_of(loader):
                what = "is empty" if length_of(loader) == 0 else "has no length"
                raise DataError(
                    f"CombinedLoader: {name!r} {what}. Give it __len__, or combine inside of one iterable dataset."
                )
        self.loaders = dict(loaders)
        self.mode: Mode = mode
        self._epoch = self._start = 0

    def set_default_seed(self, seed: int) -> None:
        """Hand the Trainer's seed on, another one to each loader."""
        for number, loader in enumerate(self.loaders.values()):
            if hasattr(loader, "set_default_seed"):
                loader.set_default_seed(combine_seeds(seed, number) >> 1 if number else seed)

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of this epoch."""
        self.seek(epoch, 0)

    def seek(self, epoch: int, samples: int) -> None:
        """Start the next pass after this many batches (see `position`) of an epoch."""
        self._epoch, self._start = epoch, samples

    def position(self, epoch: int, batches: int) -> int:
        """Return the number of batches, which is the position here."""
        return batches

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume."""
        inner = {
            name: loader.fingerprint() if hasattr(loader, "fingerprint") else {"batches": len(loader)}
            for name, loader in self.loaders.items()
        }
        return {"order": "combined", "mode": self.mode, "batches": len(self), "loaders": inner}

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.loaders.values()]
        return {"min_size": min, "sequential": sum}.get(self.mode, max)(lengths)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.loaders)

    def iter_rank(self, data_rank: int, data_world: int) -> Iterator[Portion]:
        """Iterate over one rank's part of every batch; the first loader's samples are counted."""
        divided = {name: RankLoader(loader, data_rank, data_world, name) for name, loader in self.loaders.items()}
        for portions in self._batches(divided):
            if self.mode == "sequential":
                yield portions
                continue
            counted = next(portion for portion in portions.values() if portion is not None)
            parts = {name: portion if portion is None else portion.batch for name, portion in portions.items()}
            yield Portion(parts, counted.samples, counted.total)

    def _batches(self, loaders: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the batches from the position on, read when a pass begins."""
        (start, self._start), epoch = (self._start, 0), self._epoch
        if self.mode == "sequential":
            return itertools.chain.from_iterable(self._in_turn(loaders, epoch, start))
        total = len(self)
        streams = {name: self._stream(loader, epoch, start, total) for name, loader in loaders.items()}
        return ({name: next(stream) for name, stream in streams.items()} for _ in range(start, total))

    def _in_turn(self, loaders: Mapping[str, Any], epoch: int, start: int) -> Iterator[Iterator[Any]]:
        """Yield an iterator per loader, opened when its turn comes."""
        for loader in loaders.values():
            skipped = min(start, len(loader))
            start -= skipped
            if skipped < len(loader):
                yield _opened(loader, epoch, skipped)

    def _stream(self, loader: Any, epoch: int, start: int, total: int) -> Iterator[Any]:
        """Yield a loader's batches for one epoch of all; a loader that ends begins again, or gives None."""
        length = len(loader)
        rounds = -(-total // length) if self.mode == "max_size_cycle" else 1
        for number in range(start // length, rounds):
            # every round of every epoch has a number of its own, and so an order of its own
            yield from _opened(loader, epoch * rounds + number, max(0, start - number * length))
        yield from itertools.repeat(None)


def _opened(loader: Any, epoch: int, batches: int) -> Iterator[Any]:
    """Iterate over a loader's epoch from this batch on."""
    set_epoch(loader, epoch)
    if hasattr(loader, "seek"):
        loader.seek(epoch, loader.position(epoch, batches) if batches else 0)
        return iter(loader)
    return itertools.islice(iter(loader), batches, None)
