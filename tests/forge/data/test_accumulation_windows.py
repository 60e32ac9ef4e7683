"""The feed keeps the place in any loader: one with a state of its own is continued as if nothing had happened."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import forge
from forge.data import Feed, Loader, workers
from forge.testing import TinyTask
from forge_plugins import Accumulate, Anomaly
from tests.forge.snapshot.test_resume import Noisy, resumes
from tests.support.profiles import covering, some


class Epochs:
    """A stateful loader of six batches whose order is drawn from the epoch, which its state brings back."""

    sized = True

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError
        return 6

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < 6:
            self.place += 1
            yield 10 * self.epoch + order[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Unsized(Epochs):
    sized = False


class ToldAtItsEnd(Epochs):
    """Stays at the end of an epoch until the next pass begins: the first pass after a resume is empty."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        ended, self.ended = getattr(self, "ended", False), False
        self.place = 0 if ended else self.place
        while self.place < 6:
            self.place += 1
            yield 10 * self.epoch + order[self.place - 1]
        self.ended = True


class Forgetful(ToldAtItsEnd):
    """The empty pass after a resume goes back to the epoch of the state."""

    def __iter__(self) -> Iterator[int]:
        if self.place == 6 and not getattr(self, "ended", False):
            self.ended, self.epoch = True, self.loaded
            return
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = self.epoch


class Live:
    """A loader without a length that hands out its state itself, and takes one to keep."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"place": 0, "seen": []}

    def __iter__(self) -> Iterator[int]:
        while self.state["place"] < 6:
            self.state["place"] += 1
            self.state["seen"].append(self.state["place"])
            yield self.state["place"]
        self.state["place"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def windows(feed: Feed, epochs: range, window: int = 1) -> Iterator[list[Any]]:
    for epoch in epochs:
        for taken, _ in feed.epoch(epoch, lambda: window):
            yield taken


@pytest.mark.parametrize("kind", [Epochs, Unsized, ToldAtItsEnd, Forgetful, Live])
@pytest.mark.parametrize("window", [1, 4])
def test_a_stateful_loader_is_continued_after_every_window(kind: Callable[[], Any], window: int) -> None:
    straight = list(windows(Feed(kind()), range(3), window))
    each = math.ceil(6 / window)
    for cut in range(1, 2 * each + 1):
        first, second = Feed(kind()), Feed(kind())
        taken = windows(first, range(3), window)
        for _ in range(cut):
            next(taken)
        second.load_state_dict(first.state_dict())
        assert list(windows(second, range(cut // each, 3), window)) == straight[cut:]


def test_a_state_that_was_loaded_can_be_loaded_again() -> None:
    first = Feed(Live())
    taken = windows(first, range(1))
    next(taken)
    state = first.state_dict()
    for _ in range(2):
        feed = Feed(Live())
        feed.load_state_dict(state)
        assert list(windows(feed, range(1))) == [[2], [3], [4], [5], [6]]


def test_a_resumed_feed_begins_where_it_was_put() -> None:
    feed, state = Feed(Epochs()), {"batches": 3, "samples": 12, "loader": {"epoch": 1, "place": 3}}
    feed.load_state_dict(state)
    assert feed.state_dict() == state


def test_a_resumed_epoch_with_nothing_left_is_refused() -> None:
    feed = Feed(Unsized())
    feed.load_state_dict({"batches": 3, "samples": 12, "loader": {"epoch": 0, "place": 6}})
    with pytest.raises(forge.DataError, match=r"loader Unsized gave no more batches .* after it was resumed"):
        next(feed.epoch(0, lambda: 1))


class DrawsAtItsBeginning(Epochs):
    """Draws an order from torch's own generator as its pass begins."""

    def __iter__(self) -> Iterator[int]:
        self.order = torch.randperm(6).tolist()
        return iter(self.order)


def test_beginning_a_stateful_loader_leaves_rng_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = [str(window) for window in windows(Feed(DrawsAtItsBeginning()), range(3), 6)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(drawn)) == 3


# ---------------------------------------------------------------------------------------------------------------------
# torchdata's StatefulDataLoader


def table() -> TensorDataset:
    return TensorDataset(Noisy().x, Noisy().y)


@pytest.mark.slow
@pytest.mark.parametrize("update", some([3, 7]))  # in the middle of an epoch, and at its end
@pytest.mark.parametrize(
    ("data", "options"),
    [
        pytest.param(table, {}, marks=pytest.mark.slow),
        (Noisy, {}),
        pytest.param(table, {"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param(table, {"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.slow),
    ],
    ids=["alone", "alone and augmented", "workers", "persistent workers"],
)
def test_torchdatas_stateful_loader_resumes_to_the_same_bits(
    tmp_path: Path, data: Callable[[], Any], options: dict[str, Any], update: int
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        generator = torch.Generator().manual_seed(5)
        sampler = torchdata.sampler.RandomSampler(data(), generator=generator)
        return torchdata.StatefulDataLoader(data(), batch_size=8, sampler=sampler, **options)

    resumes(tmp_path, lambda: {"train": loader(), "max_epochs": 2}, lambda updates: [update])


# ---------------------------------------------------------------------------------------------------------------------
# Samples by their indices, and workers that end


class TimeFirst(TinyTask):
    """Takes batches as (time, samples, features)."""

    def training_step(self, batch: Any) -> Any:
        x, y, weights = batch
        return super().training_step((x.mean(0) * weights[:, None], y))

    def num_items(self, batch: Any) -> int:
        return len(batch[1])


def time_first(samples: list[Any]) -> Any:
    x, y, weights = map(torch.stack, zip(*samples, strict=True))
    return x.expand(3, -1, -1), y, weights


@pytest.mark.parametrize(("sample", "window"), covering([1, 6, 9, 14, 17], [1, 2]))
def test_samples_are_found_where_the_first_dimension_is_time(tmp_path: Path, sample: int, window: int) -> None:
    weights = torch.ones(18)
    weights[sample] = math.nan
    data = TensorDataset(torch.randn(18, 6), torch.zeros(18, dtype=torch.long), weights)
    loader = Loader(data, 4, shuffle=True, collate_fn=time_first)
    anomaly = Anomaly()
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=tmp_path, plugins=[anomaly, Accumulate(window)])
    with pytest.raises(forge.NonFiniteError):
        trainer.fit(TimeFirst(), loader)
    finding = anomaly.findings[0]
    assert finding["data"][0]["samples"] == [sample]


def test_a_worker_awaits_its_main_process_by_any_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("so many files cannot be opened here")
    killed: list[int] = []
    reading, writing = os.pipe()
    os.close(writing)  # what ends a wait for it, as the end of a process does for its descriptor
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1024)
        monkeypatch.setattr(workers.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
        monkeypatch.setattr(os, "pidfd_open", lambda pid: high, raising=False)
        monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
        workers._end_with_main()
        os.close(high)
    finally:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert killed == [os.getpid()]
