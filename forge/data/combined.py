"""CombinedLoader: several loaders as one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import torch

from forge.data.accumulation_windows import length_of, set_epoch
from forge.data.protocols import is_seekable
from forge.data.sample_rng import restored_generators, seed_generators
from forge.data.sharding import Portion, RankLoader
from forge.errors import DataError, did_you_mean
from forge.rng import combine_seeds, fold

Mode = Literal["max_size_cycle", "max_size", "min_size", "sequential"]
ENDED = object()
ROUND = 10**6
"""Between the epoch numbers of two rounds within an epoch: another round has another order."""


class Combined:
    """Several loaders as one; `_batches` gives the batches of an epoch."""

    _rank_env: Any = None  # of the ranks that compare what each of the loaders gives

    def __init__(self, loaders: Mapping[str, Any], mode: Mode = "max_size_cycle"):
        if mode not in get_args(Mode):
            raise DataError(f"CombinedLoader: {mode!r} is no mode.{did_you_mean(mode, get_args(Mode))}")
        if not loaders:
            raise DataError("CombinedLoader: no loaders were given.")
        for name, loader in loaders.items():
            if length_of(loader) == 0:
                raise DataError(f"CombinedLoader: {name!r} is empty. Check its dataset, sampler and drop_last.")
        self.loaders = dict(loaders)
        self.mode: Mode = mode
        self.streams = [name for name, loader in loaders.items() if length_of(loader) is None]
        "Names of the loaders without a length."
        self._epoch = 0

    def set_default_seed(self, seed: int) -> None:
        """Hand the Trainer's seed on, another one to each loader."""
        for number, loader in enumerate(self.loaders.values()):
            if hasattr(loader, "set_default_seed"):
                loader.set_default_seed(combine_seeds(seed, number) >> 1 if number else seed)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume."""
        inner = {
            name: loader.fingerprint() if hasattr(loader, "fingerprint") else {"batches": length_of(loader)}
            for name, loader in self.loaders.items()
        }
        return {"order": "combined", "mode": self.mode, "batches": length_of(self), "loaders": inner}

    def __len__(self) -> int:
        if self.streams:
            raise TypeError(f"CombinedLoader has no length, because {self.streams[0]!r} has none.")
        lengths = [len(loader) for loader in self.loaders.values()]
        return {"min_size": min, "sequential": sum}.get(self.mode, max)(lengths)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.loaders)

    def iter_rank(self, data_rank: int, data_world: int) -> Iterator[Portion]:
        """Iterate over one rank's part of every batch; the first loader's samples are counted."""
        divided = {
            name: RankLoader(loader, data_rank, data_world, name, self._rank_env)
            for name, loader in self.loaders.items()
        }
        for portions in self._batches(divided):
            if self.mode == "sequential":
                yield portions
                continue
            counted = next(portion for portion in portions.values() if portion is not None)
            parts = {name: portion if portion is None else portion.batch for name, portion in portions.items()}
            yield Portion(parts, counted.samples, counted.total)

    def _batches(self, loaders: Mapping[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    def _no_batch(self, name: str) -> DataError:
        return DataError(f"CombinedLoader: {name!r} gave no batch when it was read again. Use 'max_size'.")


class CombinedLoader(Combined):
    """Several loaders as one, whose batches are dicts of their batches by name.

    ::

        CombinedLoader({"labelled": labelled, "unlabelled": unlabelled}, mode="min_size")

    `mode` says how long an epoch is: `max_size_cycle` as the longest loader, while the others begin again, with
    another order; `max_size` as the longest, with None for a loader that has ended; `min_size` as the shortest;
    `sequential` reads one loader after the other, and gives their batches themselves. The modes are those of Lightning.

    `fit` makes one of a dict of train loaders. If all have a length, the position in each follows from the number of
    batches, so a run resumes exactly if it would with each of the loaders. With a stream (a loader without a length)
    an epoch is as long as its loaders last: `min_size` ends with the first of them, the others with the last, and
    each epoch begins every stream again. Such a run resumes exactly if the streams have `state_dict` and
    `load_state_dict`, as `forge.data.Loader` has over a dataset with them, and torchdata's StatefulDataLoader.
    """

    def __init__(self, loaders: Mapping[str, Any], mode: Mode = "max_size_cycle"):
        super().__init__(loaders, mode)
        self._start = 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of this epoch."""
        self.seek(epoch, 0)

    def seek(self, epoch: int, samples: int) -> None:
        """Start the next pass after this many batches (see `position`) of an epoch."""
        self._epoch, self._start = epoch, samples

    def position(self, epoch: int, batches: int) -> int:
        """Return the number of batches, which is the position here."""
        return batches

    def _batches(self, loaders: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the batches from the position on, read when a pass begins."""
        (start, self._start), epoch = (self._start, 0), self._epoch
        if self.streams:
            return itertools.islice(self._until_ended(loaders, epoch), start, None)
        if self.mode == "sequential":
            return itertools.chain.from_iterable(self._in_turn(loaders, epoch, start))
        total = len(self)
        streams = {name: self._stream(loader, epoch, start, total) for name, loader in loaders.items()}
        return ({name: next(stream) for name, stream in streams.items()} for _ in range(start, total))

    def _until_ended(self, loaders: Mapping[str, Any], epoch: int) -> Iterator[Any]:
        """Yield the batches of one epoch in which the length of a loader is not known before it ends."""
        if self.mode == "sequential":
            for loader in loaders.values():
                yield from _opened(loader, epoch, 0)
            return
        running = {name: _opened(loader, epoch, 0) for name, loader in loaders.items()}
        rounds = dict.fromkeys(loaders, 1)
        while True:
            batches = {}
            for name, loader in loaders.items():
                batches[name] = next(running[name], ENDED)
                if batches[name] is ENDED:
                    rounds[name] += 1
                    if self.mode == "min_size" or min(rounds.values()) > 1:
                        return
                    cycles = self.mode == "max_size_cycle"
                    again = _opened(loader, epoch + (rounds[name] - 1) * ROUND, 0) if cycles else itertools.repeat(None)
                    running[name], batches[name] = again, next(again, ENDED)
                if batches[name] is ENDED:
                    raise self._no_batch(name)
            yield batches

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


class StatefulCombined(Combined):
    """A CombinedLoader with a state, for loaders of which some have a state rather than positions."""

    def __init__(self, loaders: Mapping[str, Any], mode: Mode = "max_size_cycle"):
        super().__init__(loaders, mode)
        self._parts = {name: _Part(loader, number) for number, (name, loader) in enumerate(self.loaders.items())}
        self._is_over = True
        "Whether the next pass begins an epoch."

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the place in each loader: its own state, or the number of its batches."""
        return {"over": self._is_over, "loaders": {name: part.state_dict() for name, part in self._parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there in the next pass."""
        self._is_over = state["over"]
        for name, part in self._parts.items():
            part.load_state_dict(state["loaders"][name])

    def _batches(self, loaders: Mapping[str, Any]) -> Iterator[Any]:
        for name, part in self._parts.items():
            part.source = loaders[name]
        return self._pass(self._epoch, begins=self._is_over)

    def _pass(self, epoch: int, begins: bool) -> Iterator[Any]:
        self._is_over = False
        for part in self._parts.values():
            if begins:
                part.is_read = False
            elif part.is_read and part.place == "inside":
                part.resume(epoch)
        read = self._in_turn if self.mode == "sequential" else self._side_by_side
        yield from read(epoch)
        self._is_over = True

    def _in_turn(self, epoch: int) -> Iterator[Any]:
        for part in self._parts.values():
            if not part.is_read:
                part.begin(epoch, 0)
            while part.place == "inside" and (batch := part.take()) is not ENDED:
                yield batch

    def _side_by_side(self, epoch: int) -> Iterator[Any]:
        for part in self._parts.values():
            if not part.is_read:
                part.begin(epoch, 0)
        while True:
            batches: dict[str, Any] = {}
            for name, part in self._parts.items():
                batch = part.take() if part.place == "inside" else None
                if batch is ENDED:
                    if self.mode == "min_size" or all(each.has_ended for each in self._parts.values()):
                        return
                    batch = None
                    if self.mode == "max_size_cycle":
                        part.begin(epoch, part.round + 1)
                        batch = part.take()
                        if batch is ENDED:
                            raise self._no_batch(name)
                batches[name] = batch
            yield batches


class _Part:
    """The passes over one of several loaders, and the place in the latest one."""

    def __init__(self, loader: Any, number: int):
        self.loader = self.source = loader
        self.round = self.given = 0
        "The passes in this epoch before this one, and the batches that this one has given."
        self.is_read = False
        "Whether a pass was begun in this epoch."
        self.place: Literal["new", "inside", "end"] = "new"
        "Whether no pass was begun yet, or where in the latest one this is."
        self._number, self._running = number, iter(())
        self._has_state = not is_seekable(loader)
        self._loaded: Any = None
        "A state that the next pass begins from."

    @property
    def has_ended(self) -> bool:
        """Whether a pass of this epoch was read to its end."""
        return self.round > 0 or self.place == "end"

    def state_dict(self) -> dict[str, Any]:
        own = self._loaded
        if own is None and self._has_state:
            with restored_generators():  # torchdata's loader draws if it has not begun
                own = self.loader.state_dict()
        place = {"round": self.round, "given": self.given, "is_read": self.is_read, "place": self.place}
        return {**place, "state": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.round, self.given, self.is_read = state["round"], state["given"], state["is_read"]
        self.place, self._loaded = state["place"], state["state"]

    def begin(self, epoch: int, number: int) -> None:
        """Begin a pass, which continues from the end of the latest one, or leaves it where it is."""
        (loaded, self._loaded), place = (self._loaded, None), self.place
        self.round, self.given, self.is_read, self.place = number, 0, True, "inside"
        if loaded is not None:
            self.loader.load_state_dict(copy.deepcopy(loaded))
            if place == "inside":  # go to the pass that was left, which advances samplers, and leave it
                with restored_generators():
                    iter(self.loader)
        self._open(epoch)
        if loaded is not None and place == "end":
            first = next(self._running, ENDED)
            if first is ENDED:  # it has continued at the end of the latest pass
                self._open(epoch)
            else:
                self._running = itertools.chain([first], self._running)

    def resume(self, epoch: int) -> None:
        """Continue a pass of which a state was loaded."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self.loader.load_state_dict(copy.deepcopy(loaded))
        self._open(epoch)

    def take(self) -> Any:
        """Return the next batch, or ENDED."""
        batch = next(self._running, ENDED)
        if batch is ENDED:
            self.place = "end"
        else:
            self.given += 1
        return batch

    def _open(self, epoch: int) -> None:
        number = epoch + self.round * ROUND
        if not self._has_state:
            self._running = _opened(self.source, number, self.given)
            return
        set_epoch(self.loader, number)
        self._running = self._seeded(number)

    def _seeded(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of a loader that may draw from the run's generators: the same numbers in a resumed run,
        although the batch after a checkpoint was read before it."""
        word = combine_seeds(torch.initial_seed(), epoch, self._number)
        with restored_generators():
            seed_generators(word)
            running = iter(self.source)
        while True:
            with restored_generators():
                seed_generators(fold(word, self.given))
                batch = next(running, ENDED)
            if batch is ENDED:
                return
            yield batch


def _opened(loader: Any, epoch: int, batches: int) -> Iterator[Any]:
    """Iterate over a loader's epoch from this batch on."""
    set_epoch(loader, epoch)
    if is_seekable(loader):
        loader.seek(epoch, loader.position(epoch, batches) if batches else 0)
        return iter(loader)
    return itertools.islice(iter(loader), batches, None)
