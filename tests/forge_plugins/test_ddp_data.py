"""ddp: the data of all ranks together are those of one process."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
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
from tests.support.profiles import some

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
    some(
        [
            (with_distributed_sampler, "DataError: The train loader has a DistributedSampler"),
            (
                with_other_lengths,
                "DataError: The ranks disagree on the number of train batches: rank 0 has 3, rank 1 has 4",
            ),
            (with_other_metrics, "TaskError: The ranks log different metrics: rank 0 has no train/odd"),
            (with_an_order_of_its_own, "DataError: The train loader OwnOrder gives another batch"),
            (with_another_seed, "DataError: The train data of rank 1 are not those of rank 0: they differ in seed"),
            (
                with_another_split,
                "DataError: The train data of rank 1 are not those of rank 0: they differ in subset 0",
            ),
            (with_a_collate_that_drops, "DataError: collate_fn turned 2 samples into 1"),
            (with_ready_batches, "DataError: forge.data.Loader with batch_size=None"),
            (with_another_model, "TaskError: Plain is another model on rank 1 than on rank 0: head.weight, head.bias"),
            (with_a_lazy_layer, "TaskError: Plain: head.weight, head.bias have no shape before the first batch"),
            (
                with_streams_of_different_lengths,
                "DataError: The ranks disagree on the number of train batches, at batch 2: rank 0 has none",
            ),
        ],
        quick=3,
    ),
)
def test_what_would_hang_ends_on_every_rank_and_is_named(case: Any, said: str) -> None:
    errors = ranks(2).errors(case)
    assert all(errors)
    assert any(error.startswith(said) for error in errors)


# -- the same samples on every rank -----------------------------------------------------------------------------------


class Files(Dataset[Any]):
    """Samples by file name; a rank may list them in an order of its own."""

    def __init__(self, names: list[int], noise: Any = None, path: str = ""):
        self.names, self.noise, self.path = names, noise, path
        self.reads = 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        name = self.names[index]
        x = torch.full((6,), float(name), dtype=torch.float64)
        if self.noise is not None:
            x = x + self.noise()
        return (x, name % 3, f"{self.path}{name}.png") if self.path else (x, name % 3)


def own_rank() -> int:
    return int(os.environ["RANK"])


def shuffled_names(count: int = 64) -> list[int]:
    return random.Random(own_rank()).sample(range(count), count)


def swapped() -> list[int]:
    names = list(range(20))
    if own_rank():
        names[7], names[8] = names[8], names[7]
    return names


def fit_on(train: Any, val: Any = None) -> None:
    options: dict[str, Any] = {"max_updates": 2, "seed": 0, "device": "cpu", "run_dir": False}
    forge.Trainer(plugins=[DDP()], allow_inexact=True, **options).fit(Tolerant(), train, val)


class Tolerant(Plain):
    """Reads the first two parts of a batch."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        return super().training_step((batch[0], batch[1]))

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        return super().validation_step((batch[0], batch[1]))


class Augmented:
    """Draws from a generator that it keeps, seeded by nobody."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __call__(self) -> float:
        return float(self.rng.normal())


class Labelled(Files):
    """The same pictures on all ranks, with labels of another order."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), float(index), dtype=torch.float64), self.names[index] % 3


class OwnSampler(Sampler[int]):
    """Draws from a generator of its own."""

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(own_rank()).permutation(64).tolist())

    def __len__(self) -> int:
        return 64


class ListedStream(IterableDataset[Any]):
    """Files in the order that a rank lists them in, from some place on."""

    def __init__(self, same: int = 0):
        self.same = same

    def __iter__(self) -> Any:
        names = [*range(self.same), *(self.same + name for name in shuffled_names(64 - self.same))]
        return iter([(torch.full((6,), float(name), dtype=torch.float64), name % 3) for name in names])


def another_order() -> None:
    fit_on(Loader(Files(shuffled_names()), 8, shuffle=True))


def another_order_in_workers() -> None:
    fit_on(Loader(Files(shuffled_names()), 8, num_workers=1))


def another_order_for_torch() -> None:
    fit_on(DataLoader(Files(shuffled_names()), batch_size=8, shuffle=True))


def another_order_of_tensors() -> None:
    names = torch.tensor(shuffled_names())
    fit_on(TensorLoader(names[:, None].expand(64, 6).double(), names % 3, batch_size=8))


def another_order_of_batches() -> None:
    batches = wide(sizes=(8,) * 6)
    fit_on([batches[0], *(batches[1:] if own_rank() else batches[:0:-1])])


def another_validation() -> None:
    fit_on(Loader(Files(list(range(64))), 8), Loader(Files(shuffled_names()), 8))


def another_named_validation() -> None:
    good = Loader(Files(list(range(64))), 8)
    fit_on(good, {"good": Loader(Files(list(range(64))), 8), "bad": Loader(Files(shuffled_names()), 8)})


def another_of_several() -> None:
    fit_on({"a": Loader(Files(list(range(64))), 8), "b": Loader(Files(shuffled_names()), 8)})


def another_order_under_augmentation() -> None:
    fit_on(Loader(Files(shuffled_names(), noise=Augmented()), 8))


def two_swapped() -> None:
    fit_on(Loader(Files(swapped()), 4))


def other_labels() -> None:
    fit_on(Loader(Labelled(shuffled_names()), 8))


def another_sampler() -> None:
    fit_on(DataLoader(Files(list(range(64))), batch_size=8, sampler=OwnSampler()))


def another_stream() -> None:
    fit_on(Loader(ListedStream(), 8))


def another_stream_after_a_while() -> None:
    fit_on(Loader(ListedStream(same=8), 8))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (another_order, "The train data of rank 1 are not those of rank 0: the sample with index"),
        (another_order_in_workers, "The train data of rank 1 are not those of rank 0: the sample with index"),
        (another_order_for_torch, "The train data of rank 1 are not those of rank 0: the sample with index"),
        (another_order_of_tensors, "The train data of rank 1 are not those of rank 0: the sample with index"),
        (another_order_of_batches, "The train loader BatchList gives another batch 1 on rank 1 than on rank 0"),
        (another_validation, "The val data of rank 1 are not those of rank 0: the sample with index"),
        (another_named_validation, "The val/bad data of rank 1 are not those of rank 0: the sample with index"),
        (another_of_several, "The train/b data of rank 1 are not those of rank 0: the sample with index"),
        (another_order_under_augmentation, "The train data of rank 1 are not those of rank 0: the sample with"),
        (two_swapped, "The train data of rank 1 are not those of rank 0: the sample with index"),
        (other_labels, "The train data of rank 1 are not those of rank 0: the sample with index"),
        (another_sampler, "The train loader DataLoader gives another order on rank 1 than on rank 0"),
        (another_stream, "The train loader DataLoader gives another batch 0 on rank 1 than on rank 0"),
        (another_stream_after_a_while, "The train loader DataLoader gives another batch 1 on rank 1"),
    ],
)
def test_samples_in_another_order_are_refused_with_the_cure(case: Any, said: str) -> None:
    for error in ranks(2).errors(case):
        assert f"DataError: {said}" in error
        assert "sorted(os.listdir(folder))" in error
        assert "random.Random(0).shuffle(files)" in error


def random_by_design() -> int:
    """Samples that draw, in every way, from the same files; how often they were read before the first update."""
    files = list(range(64))
    kept, own = np.random.default_rng(own_rank()), torch.Generator().manual_seed(own_rank())
    noises: list[Any] = [
        lambda: torch.randn(1).double(),
        random.random,
        lambda: torch.rand(1, generator=own).double(),
        kept.normal,
        random.SystemRandom().random,
        time.monotonic,
    ]
    for noise in noises:
        fit_on(Loader(Files(files, noise), 8, shuffle=True), Loader(Files(files, noise), 8))
    # the folder of the data may be another one on each host
    fit_on(Loader(Files(files, path=f"/scratch/host{own_rank() * 11}/"), 8))
    alone, ahead = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    data = Files(files, lambda: torch.rand(1, generator=ahead).double())
    fit_on(Loader(data, 8))
    torch.rand(8, generator=alone)  # two updates of four samples on this rank
    assert torch.equal(alone.get_state(), ahead.get_state())
    return data.reads - 8


@pytest.mark.slow
def test_samples_that_are_random_by_design_are_no_difference() -> None:
    assert all(0 < reads <= 128 for reads in ranks(2)(random_by_design))


class Fails(Files):
    """Cannot be read in the middle."""

    def __getitem__(self, index: int) -> Any:
        if index == 63:
            raise OSError("a broken file")
        return super().__getitem__(index)


def with_a_broken_file() -> int:
    options: dict[str, Any] = {"max_updates": 2, "seed": 0, "device": "cpu", "run_dir": False}
    result = forge.Trainer(plugins=[DDP()], **options).fit(Tolerant(), Loader(Fails(list(range(64))), 8))
    return result.updates


def test_an_error_of_the_data_is_left_to_the_run() -> None:
    assert ranks(2)(with_a_broken_file) == [2, 2]


def reads_of_one_process() -> int:
    data = Files(list(range(64)))
    forge.Trainer(plugins=[], max_updates=1, seed=0, device="cpu", run_dir=False).fit(Tolerant(), Loader(data, 8))
    return data.reads


def test_one_process_reads_nothing_ahead() -> None:
    assert reads_of_one_process() == 8


def with_other_weights() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("forge").addHandler(handler)
    try:
        for seed in (own_rank(), 0):
            train(Plain(seed), [])
    finally:
        logging.getLogger("forge").removeHandler(handler)
    return [each for each in said if "other initial weights" in each]


def test_other_initial_weights_of_a_rank_are_told_once() -> None:
    first, second = ranks(2)(with_other_weights)
    assert len(first) == 1
    assert "on rank 1 than on rank 0 (net.0.weight)" in first[0]
    assert second == []
