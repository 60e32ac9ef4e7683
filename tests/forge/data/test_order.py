"""Orders are pure functions of (seed, epoch), cover what they promise, and can be cut anywhere a batch begins."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import forge
from forge.data import Bucketed, Loader, Order, Weighted
from forge.data.order import Indices, batch_ranges, occurrences

seeds = st.integers(0, 2**40)
epochs = st.integers(0, 1000)
lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def batches(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_occurrences_count_how_often_an_index_came_before(indices: list[int]) -> None:
    expected = [indices[:place].count(index) for place, index in enumerate(indices)]
    assert occurrences(torch.tensor(indices, dtype=torch.int64)).tolist() == expected


class TestWeighted:
    @given(seed=seeds, epoch=epochs, replacement=st.booleans(), data=st.data())
    def test_it_draws_only_what_has_weight_and_repeats_itself(
        self, seed: int, epoch: int, replacement: bool, data: st.DataObject
    ) -> None:
        weights = data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=1, max_size=30).filter(any))
        positive = sum(weight > 0 for weight in weights)
        samples = data.draw(st.integers(1, 50 if replacement else positive))
        order = Weighted(weights, samples, replacement)
        drawn = torch.as_tensor(order.indices(seed, epoch)).tolist()
        assert len(drawn) == samples
        assert all(weights[index] > 0 for index in drawn)
        assert drawn == torch.as_tensor(order.indices(seed, epoch)).tolist()
        assert replacement or len(set(drawn)) == samples

    @pytest.mark.parametrize("replacement", [True, False])
    def test_it_draws_in_proportion(self, replacement: bool) -> None:
        order = Weighted([1.0, 3.0], samples=1, replacement=replacement)
        heavy = sum(int(torch.as_tensor(order.indices(7, epoch))[0]) for epoch in range(2000))
        assert 1400 < heavy < 1600

    def test_epochs_and_seeds_differ(self) -> None:
        order = Weighted([1.0] * 20)
        drawn = {tuple(torch.as_tensor(order.indices(s, e)).tolist()) for s in range(3) for e in range(3)}
        assert len(drawn) == 9

    @pytest.mark.parametrize(
        ("weights", "options", "message"),
        [
            ([1.0, -1.0], {}, "weight of sample 1 is -1.0"),
            ([float("nan")], {}, "weight of sample 0 is nan"),
            ([0.0, 0.0], {}, "every weight is zero"),
            ([], {}, "one weight per sample"),
            ([1.0], {"samples": 0}, "at least 1"),
            ([1.0, 0.0], {"replacement": False}, "only 1 have a weight above zero"),
        ],
    )
    def test_senseless_weights_are_refused(self, weights: list[float], options: dict[str, Any], message: str) -> None:
        with pytest.raises(forge.DataError, match=message):
            Weighted(weights, **options)


class TestBucketed:
    @given(lengths=lengths, size=st.integers(1, 9), pool=st.integers(1, 4), seed=seeds, epoch=epochs)
    def test_every_sample_comes_once_in_batches_of_the_asked_size(
        self, lengths: list[int], size: int, pool: int, seed: int, epoch: int
    ) -> None:
        loader = Loader(numbers(len(lengths)), size, sampler=Bucketed(lengths, pool=pool), seed=seed)
        loader.set_epoch(epoch)
        given_ = batches(loader)
        assert sorted(itertools.chain(*given_)) == list(range(len(lengths)))
        assert all(len(batch) == size for batch in given_[:-1])
        assert len(given_) == len(loader)

    @given(lengths=lengths, size=st.integers(1, 5), data=st.data())
    def test_any_batch_boundary_can_be_sought(self, lengths: list[int], size: int, data: st.DataObject) -> None:
        loader = Loader(numbers(len(lengths)), size, sampler=Bucketed(lengths), seed=1)
        loader.set_epoch(3)
        straight = batches(loader)
        done = data.draw(st.integers(0, len(straight)))
        assert loader.position(3, done) == sum(map(len, straight[:done]))
        loader.seek(3, loader.position(3, done))
        assert batches(loader) == straight[done:]

    def test_epochs_differ(self) -> None:
        loader = Loader(numbers(40), 4, sampler=Bucketed([1, 5] * 20), seed=1)
        first = batches(loader)
        loader.set_epoch(1)
        assert batches(loader) != first

    def test_what_cannot_work_is_refused(self) -> None:
        with pytest.raises(forge.DataError, match="3 lengths, but the dataset has 4"):
            Loader(numbers(4), 2, sampler=Bucketed([1, 1, 1]))
        with pytest.raises(forge.DataError, match="one length per sample"):
            Bucketed([])
        with pytest.raises(forge.DataError, match="at least 1 batch"):
            Bucketed([1], pool=0)


def test_a_position_inside_a_batch_is_refused() -> None:
    with pytest.raises(forge.DataError, match="no batch begins at sample 3 of an epoch of 8"):
        batch_ranges(8, 3, 2, False)


def test_an_order_of_ones_own_needs_no_more_than_indices() -> None:
    class Backwards(Order):
        kind = "backwards"
        samples = 5

        def indices(self, seed: int, epoch: int) -> Indices:
            return torch.arange(5).flip(0)

    loader = Loader(numbers(5), 2, sampler=Backwards())
    loader.seek(0, 2)
    assert batches(loader) == [[2, 1], [0]]
    assert loader.fingerprint()["order"] == "backwards"


def test_what_gives_no_indices_is_refused_as_a_sampler() -> None:
    data = numbers(4)
    with pytest.raises(forge.DataError, match=r"cannot take a int as sampler: it gives no indices.*Weighted.*Bucketed"):
        Loader(data, 2, sampler=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(forge.DataError, match="leave shuffle off"):
        Loader(data, 2, True, sampler=Weighted([1.0] * 4))


def test_fingerprints_tell_orders_apart() -> None:
    data = numbers(4)
    orders: list[Any] = [None, Weighted([1.0] * 4), Weighted([2.0] * 4), Bucketed([1] * 4), Bucketed([2] * 4)]
    prints = [str(Loader(data, 2, sampler=order).fingerprint()) for order in orders]
    assert len({*prints, str(Loader(data, 2, True).fingerprint())}) == 6
