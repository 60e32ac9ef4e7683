"""What a user passes as a loader is made resumable where that is possible, and named with a reason where it is not."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import forge
from forge.data import DevicePrefetch, Loader, TensorLoader, adopt, resumable_reason
from forge.data.adapt import by_name, has_single_position
from tests.support.profiles import few, some

DATA = TensorDataset(torch.arange(10))


class Augmented(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random()], dtype=torch.float64)


class Plain:
    """A loader without anything."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(2), torch.ones(2), torch.full((1,), 2.0)])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class State:
    """The methods of what can be continued."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Stateful(State, Plain):
    """A loader that says where it is."""


def batches(loader: Any) -> list[Any]:
    return [batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist() for batch in loader]


def flat(loader: Any) -> list[int]:
    return [index for batch in batches(loader) for index in batch]


def samplers() -> dict[str, Any]:
    return {
        "sequential": SequentialSampler(DATA),
        "random": RandomSampler(DATA),
        "random with replacement": RandomSampler(DATA, replacement=True, num_samples=15),
        "more than once": RandomSampler(DATA, num_samples=25),
        "weighted": WeightedRandomSampler([1.0] * 10, 7),
        "weighted without replacement": WeightedRandomSampler([1.0] * 10, 7, replacement=False),
        "subset": SubsetRandomSampler([1, 3, 5, 7]),
        "distributed": DistributedSampler(DATA, num_replicas=2, rank=1, seed=4),
    }


class TestDataLoader:
    @pytest.mark.parametrize("name", ["sequential", "random"])
    def test_every_sample_once_becomes_an_order_that_can_be_sought(self, name: str) -> None:
        given_ = DataLoader(DATA, 3, sampler=samplers()[name])
        loader = adopt(given_, "train")
        assert isinstance(loader, Loader)
        assert resumable_reason(loader) is None
        assert len(loader) == len(given_)
        loader.set_epoch(2)
        straight = batches(loader)
        assert [len(batch) for batch in straight] == [len(batch) for batch in batches(given_)]
        loader.seek(2, 3)
        assert batches(loader) == straight[1:]

    @pytest.mark.parametrize("name", list(samplers())[2:])
    def test_others_are_drawn_when_an_epoch_begins(self, name: str) -> None:
        first, second = (adopt(DataLoader(DATA, 3, sampler=samplers()[name]), "train") for _ in range(2))
        assert resumable_reason(first) is None
        first.set_epoch(2)
        straight = batches(first)
        first.set_epoch(2)
        taken = iter(first)
        next(taken)
        second.load_state_dict(first.state_dict())
        assert batches(second) == straight[1:]

    def test_they_draw_what_torchs_samplers_draw(self) -> None:
        drawn = {
            name: Counter(flat(adopt(DataLoader(DATA, 4, sampler=each), "train"))) for name, each in samplers().items()
        }
        assert drawn["sequential"] == drawn["random"] == Counter(range(10))
        assert max(drawn["random with replacement"].values()) > 1
        assert set(drawn["more than once"].values()) == {2, 3}
        assert set(drawn["weighted without replacement"].values()) == {1}
        assert drawn["subset"] == Counter([1, 3, 5, 7])
        own = DistributedSampler(DATA, num_replicas=2, rank=1, seed=4)
        loader = adopt(DataLoader(DATA, 4, sampler=own), "train")
        loader.set_epoch(3)
        own.set_epoch(3)
        assert flat(loader) == list(own)

    def test_shuffle_takes_the_trainers_seed_or_a_generators(self) -> None:
        def order(generator: int | None, trainers: int) -> list[int]:
            own = None if generator is None else torch.Generator().manual_seed(generator)
            loader = adopt(DataLoader(DATA, 4, shuffle=True, generator=own), "train")
            loader.set_default_seed(trainers)
            return flat(loader)

        assert sorted(order(None, 1)) == list(range(10))
        assert order(None, 1) != order(None, 2)
        assert order(5, 1) == order(5, 2) == flat(Loader(DATA, 4, True, seed=5))

    def test_options_are_kept(self) -> None:
        def collate(samples: list[Any]) -> str:
            return "x" * len(samples)

        def init(worker: int) -> None:
            pass

        given_ = DataLoader(
            DATA,
            4,
            collate_fn=collate,
            num_workers=1,
            drop_last=True,
            timeout=7,  # limit: it is handed on, and nobody waits
            prefetch_factor=5,
            worker_init_fn=init,
            multiprocessing_context="fork",
        )
        loader = adopt(given_, "train")
        assert list(loader) == ["xxxx", "xxxx"]
        inner = loader.loader
        assert (inner.num_workers, inner.prefetch_factor, inner.persistent_workers) == (1, 5, False)
        assert (inner.worker_init_fn.then, inner.multiprocessing_context.get_start_method()) == (init, "fork")
        assert loader._pool.data_timeout == 7

    def test_samples_are_seeded(self) -> None:
        before = random.getstate()
        first = batches(adopt(DataLoader(Augmented(), 3, shuffle=True), "train"))
        assert random.getstate() == before
        assert batches(adopt(DataLoader(Augmented(), 3, shuffle=True), "train")) == first

    def test_an_iterable_dataset_is_read_as_a_stream(self) -> None:
        class StatefulStream(State, Stream):
            """One that says where it is."""

        assert batches(adopt(DataLoader(Stream(), 2), "train")) == [[0, 1], [2, 3], [4]]
        for kind in (Stream, StatefulStream):
            assert resumable_reason(adopt(DataLoader(kind(), 2), "train")) is None

    def test_what_cannot_be_exact_is_returned_with_a_reason(self) -> None:
        class Own(DataLoader):
            def __iter__(self) -> Any:
                return iter([])

        class Endless(Sampler):
            def __iter__(self) -> Iterator[int]:
                return iter([1])

        reasons = {
            "in_order=False": DataLoader(DATA, 2, num_workers=1, in_order=False),
            "Own overrides __iter__": Own(DATA),
            "Endless has no length": DataLoader(DATA, batch_sampler=Endless()),  # pyright: ignore[reportArgumentType]
        }
        for reason, loader in reasons.items():
            assert adopt(loader, "train") is loader
            assert reason in str(resumable_reason(loader))


class Drawing(Sampler[int]):
    """Draws from the global generators."""

    def __init__(self, length: int = 10):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        return iter(torch.tensor(order)[torch.randperm(self.length)].tolist())


class Moving(Drawing):
    """Keeps a generator to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(10), 10))


class Remembering(Moving):
    """Keeps a generator, and says where it is."""

    def state_dict(self) -> dict[str, Any]:
        version, words, cached = self.random.getstate()
        return {"version": version, "words": list(words), "cached": cached}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate((state["version"], tuple(state["words"]), state["cached"]))


def own_kinds() -> dict[str, Any]:
    return {
        "sampler": lambda: DataLoader(Augmented(), 3, sampler=Drawing()),
        "batch sampler": lambda: DataLoader(Augmented(), batch_sampler=BatchSampler(Drawing(), 4, True)),
        "no batches": lambda: DataLoader(Augmented(), None, shuffle=True),
        "generator": lambda: DataLoader(
            Augmented(), batch_sampler=list_of(RandomSampler(DATA, generator=torch.Generator().manual_seed(3)))
        ),
        "remembering": lambda: DataLoader(Augmented(), 3, sampler=Remembering()),
    }


def list_of(sampler: Sampler[int]) -> Any:
    class Pairs(BatchSampler):
        pass

    return Pairs(sampler, 2, False)


class TestOwnSamplers:
    @pytest.mark.parametrize("name", some(own_kinds(), quick=2))
    @few
    @given(epoch=st.integers(0, 3), data=st.data())
    def test_they_are_continued_exactly(self, name: str, epoch: int, data: st.DataObject) -> None:
        before = random.getstate(), torch.get_rng_state().tolist()
        straight = adopt(own_kinds()[name](), "train")
        wanted = []
        for number in range(epoch + 2):
            straight.set_epoch(number)
            wanted.append(batches(straight))
        done = data.draw(st.integers(0, len(straight)))
        first, second = adopt(own_kinds()[name](), "train"), adopt(own_kinds()[name](), "train")
        for number in range(epoch + 1):
            first.set_epoch(number)
            taken = iter(first)
            for _ in range(done if number == epoch else len(first)):
                next(taken)
        ended = done == len(straight)
        second.set_epoch(epoch + ended)
        second.load_state_dict(first.state_dict())
        assert batches(second) == (wanted[epoch + 1] if ended else wanted[epoch][done:])
        assert (random.getstate(), torch.get_rng_state().tolist()) == before
        assert len({str(each) for each in wanted}) == len(wanted)

    @pytest.mark.parametrize("done", [1, 4])
    def test_one_that_draws_something_else_is_refused(self, done: int) -> None:
        first, second = (adopt(DataLoader(DATA, 3, sampler=Moving()), "train") for _ in range(2))
        list(first)
        first.set_epoch(1)
        taken = iter(first)
        for _ in range(done):
            next(taken)
        second.set_epoch(2 if done == 4 else 1)
        second.load_state_dict(first.state_dict())
        with pytest.raises(forge.DataError, match=r"BatchSampler drew another order for epoch 1"):
            iter(second)

    def test_they_are_told_the_epoch(self) -> None:
        class Told(SequentialSampler):
            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Iterator[int]:
                return iter([self.epoch] * 10)

        loader = adopt(DataLoader(DATA, 5, sampler=Told(DATA)), "train")
        loader.set_epoch(3)
        assert flat(loader) == [3] * 10


class TestLists:
    @given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8), data=st.data())
    def test_a_list_of_batches_can_be_sought(self, sizes: list[int], data: st.DataObject) -> None:
        given_ = [torch.full((size,), number) for number, size in enumerate(sizes)]
        loader = adopt(given_, "train")
        done = data.draw(st.integers(0, len(sizes)))
        loader.seek(1, sum(sizes[:done]))
        assert loader.position(1, done) == sum(sizes[:done])
        assert list(map(id, loader)) == list(map(id, given_[done:]))
        assert list(map(id, loader)) == list(map(id, given_))
        assert len(loader) == len(sizes)
        assert loader.fingerprint()["samples"] == sum(sizes)


class TestOthers:
    def test_what_can_be_continued_is_returned_as_it_is(self) -> None:
        for loader in (Loader(DATA, 2), TensorLoader(torch.zeros(2), batch_size=1), Stateful()):
            assert adopt(loader, "train") is loader
            assert resumable_reason(loader) is None

    @pytest.mark.parametrize(("loader", "reason"), [(Plain(), "Plain has neither seek"), (iter([1]), "is an iterator")])
    def test_anything_else_is_named_with_what_to_use_instead(self, loader: Any, reason: str) -> None:
        assert adopt(loader, "val") is loader
        assert reason in str(resumable_reason(loader))
        assert "forge.data.Loader" in str(resumable_reason(loader))

    def test_if_that_is_allowed_it_is_read_again_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        loader = adopt(Plain(), "train", allow_inexact=True)
        assert len(list(loader)) == 3
        with caplog.at_level(logging.WARNING, "forge"):
            loader.set_epoch(1)
            assert not caplog.records
            loader.seek(1, loader.position(1, 2))
        assert "The train loader Plain cannot resume exactly" in caplog.text
        assert "its first 2 batches are dropped" in caplog.text
        assert [batch.tolist() for batch in loader] == [[2.0]]
        assert len(list(loader)) == 3
        assert "Plain has neither" in str(resumable_reason(loader))
        with pytest.raises(TypeError):
            len(loader)

    def test_loaders_with_one_position_serve_one_stage(self) -> None:
        stream = Loader(Stream(), 2)
        own = adopt(DataLoader(DATA, 3, sampler=Drawing()), "train")
        for bad in (stream, Stateful(), own, iter([1]), DevicePrefetch(stream, "cpu"), adopt(stream, "train", True)):
            assert has_single_position(bad)
        for good in (Loader(DATA, 2), TensorLoader(torch.zeros(2), batch_size=1), adopt([DATA], "train"), Plain()):
            assert not has_single_position(good)
            assert not has_single_position(DevicePrefetch(good, "cpu"))


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(DATA, 2), lambda: TensorLoader(torch.arange(4), batch_size=2), lambda: Loader(DATA, 2)]
)
def test_a_list_of_train_loaders_is_refused_with_a_dict_to_pass(make: Any) -> None:
    with pytest.raises(
        forge.DataError, match=r"train got a list of 2 loaders.* Pass a dict: \{'a': \.\.\., 'b': .*Concat"
    ):
        adopt([make(), make()], "train")
    loaders = [make(), make()]
    assert by_name(loaders, "val") == {"0": loaders[0], "1": loaders[1]}
    assert by_name((loaders[0],), "test") is loaders[0]
