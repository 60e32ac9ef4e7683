"""ddp: the data of all ranks together are those of one process."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
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
from tests.support.ranks import heard

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


class LogsByRank(Plain):
    """Logs a metric on one rank only."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        metrics = super().training_step(batch)
        return metrics if own_rank() == 0 else {**metrics, "odd": metrics["loss"]}


class OwnOrder:
    """Draws its order from the process's random numbers."""

    def __iter__(self) -> Any:
        batches = wide()
        return iter([batches[i] for i in torch.randperm(4).tolist()])

    def __len__(self) -> int:
        return 4


class Short:
    """A batch more on each rank."""

    def __iter__(self) -> Any:
        return iter(wide()[: 2 + own_rank()])


def own_rank() -> int:
    return int(os.environ["RANK"])


def zeros() -> TensorDataset:
    return TensorDataset(torch.zeros(8, 6).double(), torch.zeros(8).long())


def drops(samples: list[Any]) -> Any:
    return default_collate(samples[1:])


def with_distributed_sampler() -> None:
    data = TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0))
    forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[DDP()]).fit(Reader(), loader)


def with_another_model() -> None:
    task = Plain()
    if own_rank():
        task.head = nn.Linear(2, 2)
    train(task, [])


def with_a_lazy_layer() -> None:
    task = Plain()
    task.head = nn.LazyLinear(3)
    train(task, [])


HANGS: dict[str, tuple[Callable[[], Any], str]] = {
    "distributed sampler": (with_distributed_sampler, "DataError: The train loader has a DistributedSampler"),
    "other lengths": (
        lambda: train(Plain(), [], wide()[: 3 + own_rank()]),
        "DataError: The ranks disagree on the number of train batches: rank 0 has 3, rank 1 has 4",
    ),
    "other metrics": (
        lambda: train(LogsByRank(), []),
        "TaskError: The ranks log different metrics: rank 0 has no train/odd",
    ),
    "an order of its own": (
        lambda: train(Plain(), [], OwnOrder(), allow_inexact=True),
        "DataError: The train loader OwnOrder gives another batch",
    ),
    "another seed": (
        lambda: train(Plain(), [], TensorLoader(*zeros().tensors, batch_size=4, seed=own_rank())),
        "DataError: The train data of rank 1 are not those of rank 0: they differ in seed",
    ),
    "another split": (
        lambda: train(Plain(), [], Loader(Subset(zeros(), [0, 1, 2, 3 + own_rank()]), 2)),
        "DataError: The train data of rank 1 are not those of rank 0: they differ in subset 0",
    ),
    "a collate that drops": (
        lambda: train(Plain(), [], Loader(zeros(), 4, collate_fn=drops)),
        "DataError: collate_fn turned 2 samples into 1",
    ),
    "ready batches": (
        lambda: train(Plain(), [], Loader(zeros(), None)),
        "DataError: forge.data.Loader with batch_size=None",
    ),
    "another model": (
        with_another_model,
        "TaskError: Plain is another model on rank 1 than on rank 0: head.weight, head.bias",
    ),
    "a lazy layer": (
        with_a_lazy_layer,
        "TaskError: Plain: head.weight, head.bias have no shape before the first batch",
    ),
    "streams of different lengths": (
        lambda: train(Plain(), [], Short(), allow_inexact=True),
        "DataError: The ranks disagree on the number of train batches, at batch 2: rank 0 has none",
    ),
}


def hangs(case: str) -> None:
    HANGS[case][0]()


@pytest.mark.parametrize("case", some(HANGS, quick=3))
def test_what_would_hang_ends_on_every_rank_and_is_named(case: str) -> None:
    errors = ranks(2).errors(hangs, case)
    assert all(errors)
    assert any(error.startswith(HANGS[case][1]) for error in errors)


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


def shuffled_names(count: int = 64) -> list[int]:
    return random.Random(own_rank()).sample(range(count), count)


def swapped() -> list[int]:
    names = list(range(20))
    if own_rank():
        names[7], names[8] = names[8], names[7]
    return names


def fit_on(train: Any, val: Any = None) -> forge.FitResult:
    options: dict[str, Any] = {"max_updates": 2, "seed": 0, "device": "cpu", "run_dir": False}
    return forge.Trainer(plugins=[DDP()], allow_inexact=True, **options).fit(Tolerant(), train, val)


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


def batches_in_another_order() -> list[Any]:
    batches = wide(sizes=(8,) * 6)
    return [batches[0], *(batches[1:] if own_rank() else batches[:0:-1])]


def tensors_in_another_order() -> TensorLoader:
    names = torch.tensor(shuffled_names())
    return TensorLoader(names[:, None].expand(64, 6).double(), names % 3, batch_size=8)


def good() -> Loader:
    return Loader(Files(list(range(64))), 8)


def bad(**options: Any) -> Loader:
    return Loader(Files(shuffled_names()), 8, **options)


ANOTHER = "data of rank 1 are not those of rank 0: the sample with index"
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "order": (lambda: bad(shuffle=True), f"The train {ANOTHER}"),
    "order in workers": (lambda: bad(num_workers=1), f"The train {ANOTHER}"),
    "order for torch": (
        lambda: DataLoader(Files(shuffled_names()), batch_size=8, shuffle=True),
        f"The train {ANOTHER}",
    ),
    "order of tensors": (tensors_in_another_order, f"The train {ANOTHER}"),
    "order of batches": (
        batches_in_another_order,
        "The train loader BatchList gives another batch 1 on rank 1 than on rank 0",
    ),
    "validation": (lambda: (good(), bad()), f"The val {ANOTHER}"),
    "named validation": (lambda: (good(), {"good": good(), "bad": bad()}), f"The val/bad {ANOTHER}"),
    "of several": (lambda: {"a": good(), "b": bad()}, f"The train/b {ANOTHER}"),
    "order under augmentation": (
        lambda: Loader(Files(shuffled_names(), noise=Augmented()), 8),
        "The train data of rank 1 are not those of rank 0: the sample with",
    ),
    "two swapped": (lambda: Loader(Files(swapped()), 4), f"The train {ANOTHER}"),
    "labels": (lambda: Loader(Labelled(shuffled_names()), 8), f"The train {ANOTHER}"),
    "sampler": (
        lambda: DataLoader(Files(list(range(64))), batch_size=8, sampler=OwnSampler()),
        "The train loader DataLoader gives another order on rank 1 than on rank 0",
    ),
    "stream": (
        lambda: Loader(ListedStream(), 8),
        "The train loader DataLoader gives another batch 0 on rank 1 than on rank 0",
    ),
    "stream after a while": (
        lambda: Loader(ListedStream(same=8), 8),
        "The train loader DataLoader gives another batch 1 on rank 1",
    ),
}


def fit_on_others(case: str) -> None:
    loaders = OTHERS[case][0]()
    fit_on(*loaders) if isinstance(loaders, tuple) else fit_on(loaders)


@pytest.mark.parametrize("case", OTHERS)
def test_samples_in_another_order_are_refused_with_the_cure(case: str) -> None:
    for error in ranks(2).errors(fit_on_others, case):
        assert f"DataError: {OTHERS[case][1]}" in error
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
    return fit_on(Loader(Fails(list(range(64))), 8)).updates


def test_an_error_of_the_data_is_left_to_the_run() -> None:
    assert ranks(2)(with_a_broken_file) == [2, 2]


def reads_of_one_process() -> int:
    data = Files(list(range(64)))
    forge.Trainer(plugins=[], max_updates=1, seed=0, device="cpu", run_dir=False).fit(Tolerant(), Loader(data, 8))
    return data.reads


def test_one_process_reads_nothing_ahead() -> None:
    assert reads_of_one_process() == 8


def with_other_weights() -> list[str]:
    with heard() as said:
        for seed in (own_rank(), 0):
            train(Plain(seed), [])
    return [each for each in said if "other initial weights" in each]


def test_other_initial_weights_of_a_rank_are_told_once() -> None:
    first, second = ranks(2)(with_other_weights)
    assert len(first) == 1
    assert "on rank 1 than on rank 0 (net.0.weight)" in first[0]
    assert second == []
