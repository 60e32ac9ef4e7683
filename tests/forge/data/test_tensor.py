"""TensorLoader: cheap batches out of resident tensors, in an order that can be continued anywhere."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.data.tensor import TensorLoader

sizes = {"samples": st.integers(1, 40), "size": st.integers(1, 12), "shuffle": st.booleans()}


def global_rng() -> tuple[Any, ...]:
    twister: Any = np.random.get_state(legacy=False)["state"]
    return random.getstate(), twister["key"].tobytes(), twister["pos"], torch.get_rng_state().numpy().tobytes()


def noisy(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A transform that draws from every generator."""
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    return batch, torch.rand(len(batch)), torch.tensor(drawn, dtype=torch.float64)


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(left, right, strict=True)
    )


@given(**sizes, seed=st.integers(-5, 2**40), epoch=st.integers(0, 9), data=st.data())
def test_seeking_gives_the_tail_of_the_straight_epoch(
    samples: int, size: int, shuffle: bool, seed: int, epoch: int, data: st.DataObject
) -> None:
    drop_last = samples >= size and data.draw(st.booleans())
    loader = TensorLoader(
        torch.arange(samples), batch_size=size, shuffle=shuffle, seed=seed, drop_last=drop_last, transform=noisy
    )
    loader.set_epoch(epoch)
    straight = list(loader)
    batch = data.draw(st.integers(0, len(loader)))
    loader.seek(epoch, min(batch * size, samples))
    assert same(list(loader), straight[batch:])
    assert len(loader) == len(straight) == (samples // size if drop_last else -(-samples // size))
    assert same(list(loader), straight)  # what was sought is used up


@given(**sizes, epoch=st.integers(0, 9))
def test_an_epoch_is_every_sample_once_as_indices_tell(samples: int, size: int, shuffle: bool, epoch: int) -> None:
    x = torch.arange(samples) * 10
    loader = TensorLoader(x, x, batch_size=size, shuffle=shuffle)
    loader.set_epoch(epoch)
    assert [len(batch) for batch, _ in loader][:-1] == [size] * (len(loader) - 1)
    given_out = [value // 10 for batch, _ in loader for value in batch.tolist()]
    assert sorted(given_out) == list(range(samples))
    assert given_out == loader.sample_indices(epoch, 0, samples)
    assert given_out[2:7] == loader.sample_indices(epoch, 2, 7)


@pytest.mark.parametrize("transform", [None, noisy])
def test_the_global_generators_are_as_before_after_every_batch(transform: Any) -> None:
    before = global_rng()
    for _ in TensorLoader(torch.arange(9), batch_size=2, shuffle=True, transform=transform):
        assert global_rng() == before


def test_generators_are_put_back_after_a_failed_transform() -> None:
    def fails(x: torch.Tensor) -> None:
        raise KeyError("broken", torch.rand(1), random.random(), np.random.rand())

    before = global_rng()
    with pytest.raises(KeyError, match="broken"):
        list(TensorLoader(torch.arange(4), batch_size=2, transform=fails))
    assert global_rng() == before


def test_a_transform_draws_by_seed_epoch_and_batch_alone() -> None:
    def drawn(seed: int, epoch: int, disturb: bool = False) -> list[float]:
        loader = TensorLoader(torch.arange(6), batch_size=2, seed=seed, transform=lambda x: torch.rand(()).item())
        loader.set_epoch(epoch)
        values = []
        for value in loader:
            values.append(value)
            if disturb:
                torch.rand(7)
        return values

    assert drawn(1, 1) == drawn(1, 1, disturb=True)
    assert len({*drawn(1, 1), *drawn(1, 2), *drawn(2, 1)}) == 9


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_changed_in_place_does_not_change_the_data(shuffle: bool) -> None:
    x = torch.ones(6, 2)
    for (batch,) in TensorLoader(x, batch_size=2, shuffle=shuffle):
        batch.zero_()
    assert x.sum() == 12


def test_seek_is_taken_when_iteration_begins() -> None:
    loader = TensorLoader(torch.arange(6), batch_size=2)
    loader.seek(0, 4)
    first = iter(loader)
    loader.seek(0, 2)
    assert [b[0].tolist() for b in first] == [[4, 5]]
    assert [b[0].tolist() for b in loader] == [[2, 3], [4, 5]]
    assert len(list(loader)) == 3


@pytest.mark.parametrize(("epoch", "samples"), [(0, 6), (0, -1), (-1, 0)])
def test_a_place_that_is_not_there_is_refused(epoch: int, samples: int) -> None:
    with pytest.raises(forge.DataError, match=r"cannot seek to sample .* an epoch has 5 samples"):
        TensorLoader(torch.arange(5), batch_size=2).seek(epoch, samples)


def test_the_fingerprint_says_what_must_be_equal() -> None:
    loader = TensorLoader(torch.arange(5), batch_size=2, shuffle=True)
    loader.set_default_seed(7)
    assert loader.fingerprint() == {
        "samples": 5,
        "batch_size": 2,
        "seed": 7,
        "order": "shuffled",
        "drop_last": False,
    }
    own = TensorLoader(torch.arange(5), batch_size=2, seed=3)
    own.set_default_seed(7)
    assert (own.fingerprint()["seed"], own.fingerprint()["order"]) == (3, "sequential")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ((), "got no tensors"),
        ((torch.zeros(0, 3),), "without samples"),
        ((torch.tensor(1.0),), "argument 0 is a tensor without dimensions"),
        ((torch.zeros(2), np.zeros(2)), "argument 1 is a ndarray.*as_tensor"),
        ((torch.zeros(2), torch.zeros(3, 1)), r"one length.*\(2,\), \(3, 1\)"),
        ((torch.zeros(2), torch.zeros(2, device="meta")), "different devices.*cpu, meta.*device="),
    ],
)
def test_what_cannot_be_gathered_from_is_refused(tensors: Any, says: str) -> None:
    with pytest.raises(forge.DataError, match=says):
        TensorLoader(*tensors, batch_size=1)
    with pytest.raises(forge.DataError, match="at least 1"):
        TensorLoader(torch.zeros(3), batch_size=0)


def test_it_can_be_pickled_with_its_place() -> None:
    loader = TensorLoader(torch.arange(8), batch_size=2, shuffle=True, seed=1)
    loader.seek(2, 4)
    assert same(list(pickle.loads(pickle.dumps(loader))), list(loader))


@pytest.mark.gpu
class TestOnTheGPU:
    def test_tensors_move_once_and_batches_keep_their_order(self) -> None:
        x = torch.arange(20)
        here, there = (TensorLoader(x, batch_size=3, shuffle=True, seed=1, device=d) for d in (None, "cuda"))
        assert [t.device.type for t in there.tensors] == ["cuda"]
        batches = [b[0] for b in there]
        assert all(batch.is_cuda for batch in batches)
        assert [b.tolist() for b in batches] == [b[0].tolist() for b in here]

    def test_cuda_random_numbers_are_seeded_by_place(self) -> None:
        def transform(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.rand(len(x), device="cuda")

        loader = TensorLoader(torch.arange(10).cuda(), batch_size=3, shuffle=True, transform=transform)
        before = torch.cuda.get_rng_state()
        straight = list(loader)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        torch.rand(5, device="cuda")
        loader.seek(0, 6)
        assert same(list(loader), straight[2:])
