"""Loaders of any kind can be fed in; a window's length and the epoch's end are known before its first backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import forge
from forge.data import Feed, Loader, TensorLoader, batch_size, epoch_order
from tests.support.profiles import some
from tests.support.tasks import fit, make_batches


class Endless:
    """A loader without a length."""

    def __init__(self, items: list[Any]):
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@given(count=st.integers(1, 9), window=st.integers(1, 4), sized=st.booleans(), epochs=st.integers(1, 3))
def test_windows_cover_each_epoch_in_order(count: int, window: int, sized: bool, epochs: int) -> None:
    items = list(range(count))
    feed = Feed(items if sized else Endless(items))
    for epoch in range(epochs):
        windows, ends = zip(*feed.epoch(epoch, lambda: window), strict=True)
        assert [item for taken in windows for item in taken] == items
        assert all(len(taken) == window for taken in windows[:-1])
        assert ends == (False,) * (len(windows) - 1) + (True,)


def test_a_loader_with_a_length_is_never_read_ahead() -> None:
    taken: list[int] = []

    class Counted(list):
        def __iter__(self) -> Any:
            for item in super().__iter__():
                taken.append(item)
                yield item

    next(Feed(Counted([1, 2, 3])).epoch(0, lambda: 1))
    assert taken == [1]


@pytest.mark.parametrize(("gives", "says"), [(2, 3), (4, 3)])
def test_a_loader_that_lies_about_its_length_is_refused(gives: int, says: int) -> None:
    class Liar:
        def __len__(self) -> int:
            return says

        def __iter__(self) -> Any:
            return iter(make_batches(gives))

    with pytest.raises(forge.DataError, match=rf"gave {gives} batches .*length is {says}|more .* length of {says}"):
        fit(train=Liar())


def test_a_one_shot_iterator_feeds_one_epoch_and_no_second() -> None:
    assert fit(train=iter(make_batches(3))).updates == 3
    with pytest.raises(forge.DataError, match=r"one-shot iterator .* consumed.*max_epochs=1"):
        fit(train=iter(make_batches(3)), max_epochs=2)


@pytest.mark.parametrize("workers", some([0, 2]))
def test_torch_dataloaders_over_map_and_iterable_datasets_work(workers: int) -> None:
    x, y = torch.randn(10, 8), torch.randint(0, 3, (10,))
    assert fit(train=DataLoader(TensorDataset(x, y), batch_size=4, num_workers=workers)).updates == 3
    assert fit(train=DataLoader(Stream(), batch_size=4, num_workers=workers)).updates == 3 * max(1, workers)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(8), 0)] * 10)


def test_nested_batches_reach_the_task_and_are_counted() -> None:
    from collections import UserDict, namedtuple
    from dataclasses import dataclass

    @dataclass
    class Record:
        x: torch.Tensor

    Pair = namedtuple("Pair", "x y")
    tensor = torch.zeros(5, 2)
    for batch in (tensor, [tensor], (1, tensor), {"a": {"b": tensor}}, Pair(tensor, 0), Record(tensor)):
        assert batch_size(batch) == 5
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 1), torch.zeros(1, 1)])
    assert batch_size(UserDict(x=tensor)) == 5
    assert batch_size((packed, 1)) == batch_size(packed) == 2
    assert batch_size("text") is None
    assert batch_size(torch.zeros(())) is None


class TestMoving:
    def test_every_tensor_moves_and_every_container_keeps_its_kind(self) -> None:
        from collections import OrderedDict, namedtuple
        from dataclasses import dataclass

        from forge.env import move

        @dataclass
        class Record:
            x: torch.Tensor
            label: str

        Pair = namedtuple("Pair", "x y")
        tensor = torch.zeros(2)
        meta = torch.device("meta")
        moved = move({"a": [tensor, (tensor, "text")], "b": Pair(tensor, 1), "c": Record(tensor, "l")}, meta)
        assert moved["a"][0].device == moved["a"][1][0].device == moved["b"].x.device == moved["c"].x.device == meta
        assert (type(moved["b"]), moved["c"].label, moved["a"][1][1]) == (Pair, "l", "text")
        assert type(move(OrderedDict(a=tensor), meta)) is OrderedDict

    def test_what_is_there_already_is_not_copied(self) -> None:
        from forge.env import move

        tensor = torch.zeros(2)
        assert move((tensor,), torch.device("cpu"))[0] is tensor

    def test_an_absent_device_is_refused_with_what_there_is(self) -> None:
        with pytest.raises(forge.ForgeError, match=r"is not a device\. Use 'auto'"):
            fit(device="gpu")
        with pytest.raises(forge.ForgeError, match=r"this machine has \d+ CUDA devices"):
            fit(device="cuda:99")


class TestOrder:
    @given(length=st.integers(0, 50), seed=st.integers(0, 2**31), epoch=st.integers(0, 1000))
    def test_it_is_a_permutation_and_a_function_of_seed_and_epoch(self, length: int, seed: int, epoch: int) -> None:
        order = epoch_order(length, seed, epoch)
        assert sorted(order.tolist()) == list(range(length))
        assert torch.equal(order, epoch_order(length, seed, epoch))

    def test_epochs_and_seeds_differ(self) -> None:
        orders = {tuple(epoch_order(20, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
        assert len(orders) == 16

    @pytest.mark.parametrize("kind", ["tensor", "loader"])
    def test_forge_loaders_take_the_trainers_seed_by_default(self, kind: str) -> None:
        x, y = torch.randn(12, 8), torch.arange(12) % 3

        def order(own: int | None, trainers: int) -> list[float]:
            seen: list[float] = []

            @forge.on("step_end")
            def watch(step: forge.Step) -> None:
                seen.extend(step.window[0][0][:, 0].tolist())

            options = {"batch_size": 4, "shuffle": True, "seed": own}
            loader = TensorLoader(x, y, **options) if kind == "tensor" else Loader(TensorDataset(x, y), **options)
            fit(train=loader, seed=trainers, max_epochs=2, plugins=[watch])
            assert sorted(seen[:12]) == sorted(seen[12:]) == sorted(x[:, 0].tolist())
            assert seen[:12] != seen[12:]
            return seen

        assert order(None, 1) == order(None, 1) == order(1, 2)
        assert order(None, 1) != order(None, 2)
