"""ddp: the data of all ranks together are those of one process."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

import forge
from forge.data import Loader, TensorLoader
from forge.data.sharding import cut
from forge_plugins import DDP
from tests.support.ddp_kit import Plain, Reader, train, wide
from tests.support.lasting_ranks import ranks

# -- data -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 9))
def test_shares_are_the_whole_batch_and_no_sample_counts_twice(begin: int, size: int, shares: int) -> None:
    places = [cut(begin, begin + size, share, shares) for share in range(shares)]
    counted = [sample for place in places if place.samples for sample in range(place.begin, place.end)]
    assert counted == list(range(begin, begin + size))
    assert sum(place.samples for place in places) == size
    assert all(begin <= place.begin < place.end <= begin + size for place in places)
    sizes = {place.samples for place in places}
    assert max(sizes) - min(sizes) <= 1


class Stream(IterableDataset[Any]):
    """Numbers without a length."""

    def __iter__(self) -> Any:
        return iter([(torch.tensor([float(i)]), i) for i in range(11)])


def loaders() -> dict[str, Any]:
    numbers = torch.arange(11.0)[:, None]
    data = TensorDataset(numbers, numbers)
    return {
        "Loader": Loader(data, 4, shuffle=True),
        "Loader with workers": Loader(data, 4, shuffle=True, num_workers=1),
        "TensorLoader": TensorLoader(numbers, numbers, batch_size=4, shuffle=True),
        "DataLoader": DataLoader(data, batch_size=4, shuffle=True),
        "list": [(part, part) for part in numbers.split(4)],
        "stream": Loader(Stream(), 4),
    }


def read() -> dict[str, Any]:
    found = {}
    for name, loader in loaders().items():
        several = [DDP()] if "RANK" in os.environ else []
        task = Reader()
        trainer = forge.Trainer(max_epochs=2, seed=3, device="cpu", run_dir=False, plugins=several)
        result = trainer.fit(task, loader, loaders()[name] if name != "stream" else None)
        found[name] = {"seen": task.seen, "metrics": result.metrics, "progress": trainer.progress.sample}
        found[name]["predicted"] = trainer.predict(task, loaders()["list"])
    return found


def test_all_ranks_follow_the_order_of_one_process() -> None:
    alone, together = read(), ranks(2)(read)
    for name, single in alone.items():
        for number, batch in enumerate(single["seen"]):
            places = [cut(0, len(batch), share, 2) for share in range(2)]
            shares = [rank[name]["seen"][number] for rank in together]
            assert shares == [batch[place.begin : place.end] for place in places], name
        for rank in together:
            assert rank[name]["progress"] == single["progress"] == 22
            assert rank[name]["metrics"].get("val/mean") == pytest.approx(single["metrics"].get("val/mean"))
            for predicted in (rank[name]["predicted"], single["predicted"]):
                assert list(itertools.chain(*predicted)) == [float(i) for i in range(11)]


def with_distributed_sampler() -> None:
    data = TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0))
    forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[DDP()]).fit(Reader(), loader)


def with_other_lengths() -> None:
    data = wide()[: 3 + int(os.environ["RANK"])]
    train(Plain(), [], data)


class LogsByRank(Plain):
    """Logs a metric on one rank only."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        metrics = super().training_step(batch)
        return metrics if os.environ["RANK"] == "0" else {**metrics, "odd": metrics["loss"]}


def with_other_metrics() -> None:
    train(LogsByRank(), [])


class OwnOrder:
    """Draws its order from the process's random numbers."""

    def __iter__(self) -> Any:
        batches = wide()
        return iter([batches[i] for i in torch.randperm(4).tolist()])

    def __len__(self) -> int:
        return 4


def with_an_order_of_its_own() -> None:
    train(Plain(), [], OwnOrder(), allow_inexact=True)


def with_another_seed() -> None:
    data = TensorLoader(torch.zeros(8, 6).double(), torch.zeros(8).long(), batch_size=4, seed=int(os.environ["RANK"]))
    train(Plain(), [], data)


def with_another_split() -> None:
    numbers = TensorDataset(torch.zeros(8, 6).double(), torch.zeros(8).long())
    train(Plain(), [], Loader(Subset(numbers, [0, 1, 2, 3 + int(os.environ["RANK"])]), 2))


def drops(samples: list[Any]) -> Any:
    return default_collate(samples[1:])


def with_a_collate_that_drops() -> None:
    numbers = TensorDataset(torch.zeros(8, 6).double(), torch.zeros(8).long())
    train(Plain(), [], Loader(numbers, 4, collate_fn=drops))


def with_ready_batches() -> None:
    numbers = TensorDataset(torch.zeros(8, 6).double(), torch.zeros(8).long())
    train(Plain(), [], Loader(numbers, None))


def with_another_model() -> None:
    task = Plain()
    if os.environ["RANK"] == "1":
        task.head = nn.Linear(2, 2)
    train(task, [])


def with_a_lazy_layer() -> None:
    task = Plain()
    task.head = nn.LazyLinear(3)
    train(task, [])


def with_streams_of_different_lengths() -> None:
    class Short:
        def __iter__(self) -> Any:
            return iter(wide()[: 2 + int(os.environ["RANK"])])

    train(Plain(), [], Short(), allow_inexact=True)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (with_distributed_sampler, "DataError: The train loader has a DistributedSampler"),
        (
            with_other_lengths,
            "DataError: The ranks disagree on the number of train batches: rank 0 has 3, rank 1 has 4",
        ),
        (with_other_metrics, "TaskError: The ranks log different metrics: rank 0 has no train/odd"),
        (with_an_order_of_its_own, "DataError: The train loader OwnOrder gives other batches on another rank"),
        (with_another_seed, "DataError: The train data of rank 1 are not those of rank 0: they differ in seed"),
        (with_another_split, "DataError: The train data of rank 1 are not those of rank 0: they differ in subset 0"),
        (with_a_collate_that_drops, "DataError: collate_fn turned 2 samples into 1"),
        (with_ready_batches, "DataError: forge.data.Loader with batch_size=None"),
        (with_another_model, "TaskError: Plain is another model on rank 1 than on rank 0: head.weight, head.bias"),
        (with_a_lazy_layer, "TaskError: Plain: head.weight, head.bias have no shape before the first batch"),
        (with_streams_of_different_lengths, "DataError: The ranks disagree on the number of batches: rank 0 has 1"),
    ],
)
def test_what_would_hang_ends_on_every_rank_and_is_named(case: Any, said: str) -> None:
    errors = ranks(2).errors(case)
    assert all(errors)
    assert any(error.startswith(said) for error in errors)
