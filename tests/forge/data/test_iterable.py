"""Iterable datasets: continued exactly where they carry state, whatever was prefetched, epoch after epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import forge
from forge.data import Loader, adopt
from tests.support.profiles import some


class Stream(IterableDataset):
    """Each worker's share of some numbers, with a random number each; it cannot say where it is."""

    def __init__(self, length: int = 11):
        self.length = length

    def share(self) -> range:
        worker = get_worker_info()
        return range(self.length) if worker is None else range(worker.id, self.length, worker.num_workers)

    def __iter__(self) -> Iterator[Any]:
        for number in self.share():
            yield torch.tensor([number, random.random()], dtype=torch.float64)


class Counting(Stream):
    """Keeps its place, which is set back at the end."""

    place, passes = 0, 0

    def __iter__(self) -> Iterator[Any]:
        share = self.share()
        while self.place < len(share):
            self.place += 1
            yield torch.tensor([share[self.place - 1], self.passes, random.random()], dtype=torch.float64)
        self.place = 0
        self.passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.passes = state["place"], state["passes"]


class Starting(Stream):
    """Keeps where to start apart from where it is, so that its state at the end says: begin at the end."""

    start = place = 0

    def __iter__(self) -> Iterator[Any]:
        share = self.share()
        for place in range(self.start, len(share)):
            self.place = place + 1
            yield torch.tensor([share[self.place - 1], random.random()], dtype=torch.float64)
        self.start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.place = state["place"]


def epochs(loader: Any, count: int, first: int = 0) -> list[list[Any]]:
    """Each epoch's batches, as the Trainer asks for them."""
    result = []
    for epoch in range(first, first + count):
        loader.set_epoch(epoch)
        result.append([batch.tolist() for batch in loader])
    return result


def resumed(kind: type[Stream], length: int, size: int, workers: int, stop: int, **options: Any) -> tuple[Any, Any]:
    """Two epochs straight, and the same with a new loader after `stop` batches: (straight, killed and resumed)."""
    straight: Any = Loader(kind(length), size, num_workers=workers, seed=5, **options)
    first: Any = Loader(kind(length), size, num_workers=workers, seed=5, **options)
    second: Any = Loader(kind(length), size, num_workers=workers, seed=5, **options)
    wanted, given_ = epochs(straight, 3), []
    left, epoch, ended = stop, 0, False
    while left > 0 or epoch == 0:
        first.set_epoch(epoch)
        taken, ended, rows = iter(first), False, []
        given_.append(rows)
        while left > 0:
            try:
                rows.append(next(taken).tolist())
            except StopIteration:
                ended = True
                break
            left -= 1
        epoch += 1
        if not ended:
            break
    state = first.state_dict()
    if ended and not given_[-1]:
        given_.pop()
    second.set_epoch(epoch if ended else epoch - 1)
    second.load_state_dict(state)
    rest = [batch.tolist() for batch in second]
    if ended:
        given_.append(rest)
    else:
        given_[-1] += rest
    given_ += epochs(second, 3 - len(given_), len(given_))
    return wanted, given_


@pytest.mark.parametrize("kind", [Stream, Counting, Starting])
@given(length=st.integers(1, 14), size=st.integers(1, 7), stop=st.integers(0, 12))
def test_a_run_continued_anywhere_is_the_straight_run(kind: type[Stream], length: int, size: int, stop: int) -> None:
    batches = -(-length // size)
    wanted, given_ = resumed(kind, length, size, 0, min(stop, 2 * batches))
    assert given_ == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stream, Counting])
@pytest.mark.parametrize(("persistent", "stop"), [(True, 3), (False, 7), (False, 2), (True, 6)])
def test_so_it_is_with_workers_whatever_they_have_prefetched(kind: type[Stream], persistent: bool, stop: int) -> None:
    wanted, given_ = resumed(kind, 11, 2, 2, stop, prefetch_factor=3, persistent_workers=persistent)
    assert given_ == wanted
    assert sorted(row[0] for batch in wanted[0] for row in batch) == list(range(11))


def test_the_state_is_that_of_the_batches_handed_out() -> None:
    loader: Any = Loader(Counting(20), 2, num_workers=3, prefetch_factor=4)
    taken = iter(loader)
    for _ in range(4):
        next(taken)
    state = loader.state_dict()
    assert [stream["dataset"]["place"] for stream in state["streams"]] == [4, 2, 2]
    assert state["next"] == 1


def test_no_worker_and_one_are_the_same() -> None:
    alone: Any = Loader(Counting(7), 2, seed=1)
    helped: Any = Loader(Counting(7), 2, num_workers=1, seed=1)
    assert epochs(alone, 2) == epochs(helped, 2)
    assert alone.fingerprint() == helped.fingerprint()
    assert alone.fingerprint()["workers"] == 1
    next(iter(alone))
    helped.load_state_dict(alone.state_dict())
    assert [batch[:, 0].tolist() for batch in helped] == [[2, 3], [4, 5], [6]]


def test_another_number_of_workers_is_refused() -> None:
    state = Loader(Counting(), 2, num_workers=2).state_dict()  # pyright: ignore[reportAttributeAccessIssue]
    one: Any = Loader(Counting(), 2)
    one.load_state_dict(state)  # nothing had been read
    state = {"epoch": 0, "next": 0, "streams": [None, None]}
    with pytest.raises(forge.DataError, match=r"read in 2 streams and now in 1.*num_workers=2"):
        one.load_state_dict(state)


def test_a_pass_given_up_is_begun_again() -> None:
    loader: Any = Loader(Counting(7), 2, seed=1)
    next(iter(loader))
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize("kind", [Stream, Counting])
def test_iterating_does_not_touch_the_global_generators(kind: type[Stream]) -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    first = epochs(Loader(kind(), 2, seed=1), 2)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert epochs(Loader(kind(), 2, seed=1), 2) == first
    assert epochs(Loader(kind(), 2, seed=2), 2) != first


class Shuffling(Stream):
    """In another order in every pass, by a generator of its own."""

    def __init__(self, length: int = 1100):
        super().__init__(length)
        self.random = random.SystemRandom()

    def share(self) -> Any:
        return self.random.sample(range(self.length), self.length)


def test_a_dataset_without_state_that_gives_other_samples_is_not_continued(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="forge")
    first: Any = Loader(Shuffling(), 3)
    next(iter(first))
    second: Any = Loader(Shuffling(), 3)
    second.load_state_dict(first.state_dict())
    assert "its first 3 samples of this epoch are read again" in caplog.text
    with pytest.raises(forge.DataError, match=r"gives other samples than .* shuffle\(seed=0\).* set_epoch"):
        list(second)
    lenient: Any = adopt(Loader(Shuffling(), 3), "train", allow_inexact=True)
    lenient.load_state_dict(first.state_dict())
    assert len(list(lenient)) == 366


def test_a_length_is_known_only_where_it_can_be() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.length

    assert len(Loader(Sized(5), 2)) == 3
    assert len(Loader(Sized(5), 2, drop_last=True)) == 2
    for loader in (Loader(Stream(5), 2), Loader(Sized(5), 2, num_workers=2)):
        with pytest.raises(TypeError):
            len(loader)


def test_a_stream_that_raises_is_named_with_its_place() -> None:
    class Bad(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield 1
            raise OSError("gone")

    with pytest.raises(forge.DataError, match=r"Bad raised OSError: gone after 1 samples of its stream 0, in the main"):
        list(Loader(Bad(), 4))
    with pytest.raises(forge.DataError, match=r"after 1 samples of its stream 0, in worker 0"):
        list(Loader(Bad(), 4, num_workers=1))


def test_options_without_meaning_for_a_stream_are_refused() -> None:
    with pytest.raises(forge.DataError, match="Stream is an iterable dataset, which defines its own order"):
        Loader(Stream(), 2, True)
    with pytest.raises(forge.DataError, match="no batch to drop"):
        Loader(Stream(), None, drop_last=True)
    with pytest.raises(forge.DataError, match="its own generator"):
        Loader(Stream(), 2, generator=torch.Generator())


def test_the_dataset_is_told_the_epoch() -> None:
    class Told(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            yield self.epoch

    for workers in (0, 1):
        assert epochs(Loader(Told(), 1, num_workers=workers), 2) == [[[0]], [[1]]]


class Range(IterableDataset):
    """A range that a worker_init_fn splits, as torch's documentation shows."""

    def __init__(self, start: int, end: int):
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def split(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    whole: Any = info.dataset
    each = -(-(whole.end - whole.start) // info.num_workers)
    whole.start += worker * each
    whole.end = min(whole.start + each, whole.end)


@pytest.mark.parametrize("ours", some([False, True], quick=1))
def test_a_worker_init_fn_splits_the_dataset(ours: bool) -> None:
    """Torch's documented way. It changed forge's wrapper once, and each worker gave every item."""
    loader: Any = DataLoader(Range(3, 11), batch_size=2, num_workers=2, worker_init_fn=split)
    if ours:
        loader = Loader(Range(3, 11), 2, num_workers=2, worker_init_fn=split, shuffle=False)
    assert sorted(int(item) for batch in loader for item in batch) == list(range(3, 11))
