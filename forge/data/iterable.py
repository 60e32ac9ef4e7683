"""Iterable datasets: one stream per worker, which resumes exactly, by the dataset's state or by reading again.

To torch the dataset looks like one with indices, but each "index" is a `Turn`: begin or continue a stream, or skip. So
the state of a stream travels to its worker and comes back with each batch, and batches that were prefetched but not
yielded are forgotten. Streams take turns, as in torch; which one is next is part of the state.

Every pass but the first begins by loading a state, after another pass, a cancelled one or a restart alike: so a resumed
run cannot differ from an uninterrupted one.

A dataset without a state is read again from the beginning of the epoch, and the last samples that were used are
compared with what they were: so one that gives another order is refused. The state of a stream of Hugging Face's
`datasets` with a shuffle buffer leaves out what is in the buffer, so it is read again too.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert, get_worker_info

from forge.data.accumulation_windows import is_stateful
from forge.data.known_streams import leaves_out_samples
from forge.data.sample_rng import OwnSeed, restored_generators, seed_generators
from forge.data.sample_seeding import OwnGenerators, failed, is_pure, is_pure_collate, what, where
from forge.data.workers import DATA_TIMEOUT, Pool
from forge.errors import DataError
from forge.rng import combine_seeds, fold
from forge.util.digest import agrees, lasting

logger = logging.getLogger("forge")

_BEGIN = 0xBE61
"""Makes the seed at the beginning of a stream differ from its samples' seeds."""
_COMPARED = 4
"""Samples at the end of a batch whose checksum is kept."""


class OtherSamples(DataError):
    """A stream that was read again gave other samples."""


class Turn(NamedTuple):
    """The next request to one stream."""

    stream: int
    seed: int
    epoch: int
    pass_number: int
    state: dict[str, Any] | None
    "The stream's state as the pass begins: its dataset's state and its count of samples; None for a new dataset."
    idle: bool = False
    "Whether to do nothing: the turn only keeps the others in step."


class StreamPiece(NamedTuple):
    """A stream's answer: a batch or None, and its new state."""

    stream: int
    batch: Any = None
    state: dict[str, Any] | None = None


class Streams(Dataset[Any]):
    """The dataset in its worker: one stream, of which each turn gives the next batch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        collate: Callable[..., Any],
        drop_last: bool,
        pure: bool | None,
    ):
        self.dataset, self.batch_size, self.collate, self.drop_last = dataset, batch_size, collate, drop_last
        self.seeding = not (is_pure(dataset) if pure is None else pure) or not (pure or is_pure_collate(collate))
        self.stateful = is_stateful(dataset) and not leaves_out_samples(dataset)
        "Whether a pass is continued by the dataset's state, and not by reading the samples before again."
        self.lenient = False
        "Whether other samples are taken too (allow_inexact)."
        self._own = OwnGenerators(dataset=dataset, collate=collate)
        self._pass, self._count = -1, 0
        self._last: Any = None
        # taken now: a run that resumes restores the dataset's generators before its first pass
        self._initial = copy.deepcopy(dataset.state_dict()) if self.stateful else None

    def __getitems__(self, turn: Turn) -> Any:
        if turn.idle:
            return StreamPiece(turn.stream)
        if get_worker_info() is not None or not self.seeding:
            return self._take(turn)
        with restored_generators():
            return self._take(turn)

    def _take(self, turn: Turn) -> Any:
        self._word = combine_seeds(turn.seed, turn.epoch, turn.stream)
        try:
            if turn.pass_number != self._pass:
                self._begin(turn)
            samples = self._next_samples()
            batch = self._collated(samples) if samples else None
        except OtherSamples as error:
            return failed(str(error), error)
        except Exception as error:
            return failed(
                f"{type(self.dataset).__name__} raised {what(error)} after {self._count} samples of its stream "
                f"{turn.stream}, {where()}.",
                error,
            )
        return StreamPiece(turn.stream, batch, self._state())

    def _begin(self, turn: Turn) -> None:
        """Restore the dataset's state at the beginning of a pass, and skip one empty pass at the end of the last."""
        is_first, self._pass, self._ended, self._ahead = self._pass < 0, turn.pass_number, False, []
        if self.seeding:
            self._own.begin(turn.pass_number)
        state = turn.state
        if self.stateful:
            if state is None:
                state = {"dataset": self._initial, "samples": 0, "begun": is_first}
            self.dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self._count = 0 if state is None else state["samples"]
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(turn.epoch)
        self._open()
        if not self.stateful and self._count:
            assert state is not None
            self._reread(state)
        if self.stateful and state is not None and not state["begun"] and not self._fill(1):
            self._open()
            if not self._fill(1):  # streams of `datasets` stay at the end of an epoch that is read again
                self.dataset.load_state_dict(copy.deepcopy(self._initial))
                self._open()

    def _reread(self, state: Mapping[str, Any]) -> None:
        """Read the samples that were used before; refuse another order."""
        self._count, last = 0, deque[Any](maxlen=self.batch_size or 1)
        while self._count < state["samples"] and self._fill(1):
            last.append(self._ahead.pop())
        if not self.lenient and not agrees(state["last"], [*last][-_COMPARED:]):
            raise OtherSamples(
                f"{type(self.dataset).__name__} gives other samples than those that the run was trained on in this "
                "epoch. Shuffle it with a fixed seed, as in shuffle(seed=0), read the files that it began with, and "
                "where epochs differ in their order give it set_epoch(epoch)."
            )

    def _open(self) -> None:
        self._ended = False
        if self.seeding:
            self._seed(_BEGIN)
        self._iterator = iter(self.dataset)

    def _seed(self, number: int) -> None:
        word = fold(self._word, number)
        seed_generators(word)
        self._own.seed(word)

    def _fill(self, size: int) -> int:
        """Read until `size` samples are buffered; return how many are."""
        while len(self._ahead) < size and not self._ended:
            if self.seeding:
                self._seed(self._count + 2**32)
            try:
                self._ahead.append(next(self._iterator))
                self._count += 1
            except StopIteration:
                self._ended = True
        return len(self._ahead)

    def _next_samples(self) -> list[Any]:
        size = self.batch_size or 1
        enough = self._fill(size) == size or not self.drop_last
        samples, self._ahead = self._ahead if enough else [], []
        if samples and not self.stateful:
            self._last = lasting(samples[-_COMPARED:])
        return samples

    def _collated(self, samples: list[Any]) -> Any:
        return self.collate(samples[0] if self.batch_size is None else samples)

    def _state(self) -> dict[str, Any]:
        state = {"samples": self._count, "begun": True, "ended": self._ended}
        if self.stateful:
            return {**state, "dataset": self.dataset.state_dict()}
        return {**state, "last": self._last}


class StreamLoader(OwnSeed):
    """Batches of an iterable dataset, made by `forge.data.Loader`."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int | None,
        shuffle: bool = False,
        num_workers: int = 0,
        *,
        seed: int | None = None,
        pure: bool | None = None,
        drop_last: bool = False,
        data_timeout: float = DATA_TIMEOUT,
        **options: Any,
    ):
        name = type(dataset).__name__
        if shuffle or options.pop("sampler", None) is not None or "batch_sampler" in options:
            raise DataError(
                f"{name} is an iterable dataset, which defines its own order. Leave shuffle and sampler off."
            )
        for key, instead in {"generator": "pass seed=", "timeout": "pass data_timeout="}.items():
            if key in options:
                raise DataError(f"forge.data.Loader has its own {key}: {instead}.")
        if batch_size is not None and batch_size < 1:
            raise DataError(f"forge.data.Loader: batch_size is {batch_size}; it must be at least 1.")
        if batch_size is None and drop_last:
            raise DataError("forge.data.Loader: batch_size=None makes no batch to drop; leave drop_last off.")
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.own_seed = seed
        collate = options.pop("collate_fn", None) or (default_convert if batch_size is None else default_collate)
        self._source = Streams(dataset, batch_size, collate, drop_last, pure)
        self._pool = Pool(self._source, name, num_workers, data_timeout, **options)
        self.loader = self._pool.loader
        self._streams = max(1, num_workers)
        self._pass = 0
        self._epoch: int | None = None
        self._base: _Standing | None = None
        self._now: _Standing | None = None
        self._resuming = False

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch; the dataset's own `set_epoch` is called if it has one."""
        self._epoch = epoch

    def allow_inexact(self) -> None:
        """Let a resume continue with other samples than the run was trained on."""
        self._source.lenient = True

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with this loader: the number of streams too."""
        return {
            "order": "stream",
            "dataset": type(self.dataset).__name__,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
            "workers": self._streams,
        }

    def __len__(self) -> int:
        if self._streams > 1:
            raise TypeError(f"The number of batches of {self._streams} streams is not known before they end.")
        samples = len(self.dataset)  # pyright: ignore[reportArgumentType]
        size = self.batch_size or 1
        return samples // size if self.drop_last else math.ceil(samples / size)

    def __iter__(self) -> Iterator[Any]:
        self._pass += 1
        base, now = self._base, self._now if self._resuming else None
        self._resuming = False
        if now is not None and (not now.over if self._epoch is None else now.epoch == self._epoch):
            standing = _Standing(now.epoch, now.next, list(now.streams))
        elif base is None:
            standing = _Standing(self._epoch or 0, 0, [None] * self._streams)
        else:
            standing = base.after(base.epoch if self._epoch is None else self._epoch)
        begin = Turn(0, self.seed, standing.epoch, self._pass, None)
        turns = _turns(begin, standing.next, list(standing.streams))
        return self._pieces(self._pool.run(turns, self.seed + standing.epoch), standing)

    def _pieces(self, pieces: Iterator[Any], standing: _Standing) -> Iterator[Any]:
        """Yield the batches; record the state of each stream as its batch is yielded."""
        self._now = standing
        while not standing.over:
            piece: StreamPiece = next(pieces)
            if piece.state is None or _ended(standing.streams[piece.stream]):
                continue
            standing.streams[piece.stream] = piece.state
            standing.next = (piece.stream + 1) % self._streams
            if standing.over:
                self._base = copy.deepcopy(standing)  # in this process the states may be live parts of the dataset
            if piece.batch is not None:
                yield piece.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every stream after the last batch yielded, and which one is next."""
        now = self._now or self._base
        if now is None:
            return {"epoch": 0 if self._epoch is None else self._epoch, "next": 0, "streams": None}
        state = {"epoch": now.epoch, "next": now.next, "streams": copy.deepcopy(now.streams)}
        if self._base is None or now.over:
            return state
        before = {"epoch": self._base.epoch, "next": self._base.next, "streams": copy.deepcopy(self._base.streams)}
        return {**state, "before": before}  # a pass that is left before its end does not count

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there in the next pass, or with the next epoch if that was the end of one."""
        streams = state["streams"]
        if streams is None:
            self._base = self._now = None
            return
        if len(streams) != self._streams:
            raise DataError(
                f"{type(self.dataset).__name__} was read in {len(streams)} streams and now in {self._streams}, one per "
                f"worker. Set num_workers={len(streams)} to resume exactly."
            )
        self._base = self._now = _Standing(state["epoch"], state["next"], list(streams))
        self._resuming = True
        if not self._now.over:
            self._say_what_is_read_again(streams)
            self._epoch, before = self._now.epoch, state.get("before")
            self._base = before and _Standing(before["epoch"], before["next"], list(before["streams"]))

    def _say_what_is_read_again(self, streams: list[Any]) -> None:
        if not self._source.stateful:
            count = sum(stream["samples"] for stream in streams if stream is not None and not stream["ended"])
            logger.info(
                f"{type(self.dataset).__name__} has no state that holds its place: its first {count} samples of this "
                "epoch are read again."
            )


def _turns(begin: Turn, first: int, states: list[Any]) -> Iterator[Turn]:
    """Yield turns without end, in the order of workers: torch gives the first to worker 0, the second to worker 1."""
    streams = len(states)
    for turn in itertools.count():
        stream = turn % streams
        state = states[stream] if turn < first + streams else None  # sent once: it may be large
        yield begin._replace(stream=stream, state=state, idle=turn < first or _ended(states[stream]))


@dataclass(slots=True)
class _Standing:
    """The state of a pass: whose turn it is, and the state of each stream (None for a new dataset)."""

    epoch: int
    next: int
    streams: list[dict[str, Any] | None]

    @property
    def over(self) -> bool:
        return all(map(_ended, self.streams))

    def after(self, epoch: int) -> _Standing:
        """Return the state at the beginning of the next pass: every stream continues from its state."""
        again = {"samples": 0, "begun": False, "ended": False}
        return _Standing(epoch, 0, [state and {**state, **again} for state in self.streams])


def _ended(state: dict[str, Any] | None) -> bool:
    return state is not None and state["ended"]
