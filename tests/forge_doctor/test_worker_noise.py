"""Workers that draw the same random numbers are found; workers that are seeded apart are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

import forge
from forge.data.adapt import adopt
from forge_doctor.patient import NotApplicable
from forge_doctor.probes import worker_noise
from tests.support.patients import Healthy, found, loader, numbers
from tests.support.profiles import some

NAME = "workers_repeat_noise"


class Jittered(Dataset[Any]):
    """Rows with noise."""

    def __init__(self) -> None:
        self.x, self.y = numbers(64)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * self.noise(), self.y[index]

    def noise(self) -> Tensor:
        raise NotImplementedError


class FromAttribute(Jittered):
    """A generator that is made once, which each worker copies."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(7)

    def noise(self) -> Tensor:
        return torch.from_numpy(self.rng.normal(size=8)).float()


class FromTorch(Jittered):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def noise(self) -> Tensor:
        return torch.randn(8, generator=self.generator)


class MadeInTheWorker(FromAttribute):
    """A generator that each worker makes at its first sample, with one seed."""

    rng: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.rng = None

    def seed(self) -> int:
        return 7

    def noise(self) -> Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(self.seed())
        return super().noise()


class MadeByWorker(MadeInTheWorker):
    def seed(self) -> int:
        return torch.initial_seed()


class FromNumpy(Jittered):
    def noise(self) -> Tensor:
        return torch.from_numpy(np.random.normal(size=8)).float()


class ByIndex(FromAttribute):
    """Noise that belongs to its sample."""

    def __getitem__(self, index: int) -> Any:
        noise = np.random.default_rng(index).normal(size=8)
        return self.x[index] + 0.1 * torch.from_numpy(noise).float(), self.y[index]


class Counts(Jittered):
    """No noise, but every reading is another: its copies count alike."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def noise(self) -> Tensor:
        self.count += 1
        return torch.tensor(float(self.count % 2))


class Foreign:
    """A loader that forge cannot take over."""

    def __init__(self, loader: DataLoader[Any]):
        self.batches = loader

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def seeds_alike(worker: int) -> None:
    np.random.seed(0)


def seeds_apart(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


def names(dataset: Dataset[Any], foreign: bool = False, workers: int = 2, **options: Any) -> set[str]:
    """What the probe finds in the loader that a fit would use."""
    given: Any = DataLoader(dataset, 16, num_workers=workers, **options)
    used = adopt(Foreign(given) if foreign else given, "train")
    patient: Any = SimpleNamespace(trainer=SimpleNamespace(loaders={"train": {None: used}}))
    try:
        return {finding.name for finding in worker_noise.workers(patient)}
    except NotApplicable:
        return set()


@pytest.mark.slow
@pytest.mark.parametrize("dataset", some([MadeInTheWorker, FromAttribute, FromTorch]))
def test_workers_of_a_foreign_loader_that_draw_alike(dataset: Callable[[], Dataset[Any]]) -> None:
    assert names(dataset(), foreign=True) == {NAME}


@pytest.mark.slow
def test_workers_that_their_own_function_seeds_alike() -> None:
    assert names(FromNumpy(), foreign=True, worker_init_fn=seeds_alike) == {NAME}


@pytest.mark.slow
def test_workers_that_their_own_function_seeds_apart() -> None:
    assert names(FromAttribute(), foreign=True, worker_init_fn=seeds_apart) == set()


@pytest.mark.slow
def test_a_generator_that_forge_has_not_seen_yet() -> None:
    train = DataLoader(MadeInTheWorker(), 16, num_workers=2)
    report = forge.doctor(Healthy(), train, budget=0)
    [finding] = [finding for finding in report.findings if finding.name == NAME]
    assert finding.where == "dataset.rng"
    assert finding.evidence["workers"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("dataset", some([FromTorch, FromAttribute, FromNumpy, MadeByWorker, ByIndex, Counts]))
def test_workers_that_forge_seeds_differ(dataset: Callable[[], Dataset[Any]]) -> None:
    assert names(dataset()) == set()


@pytest.mark.slow
@pytest.mark.parametrize("dataset", some([MadeByWorker, FromNumpy, ByIndex, Counts]))
def test_foreign_workers_that_differ(dataset: Callable[[], Dataset[Any]]) -> None:
    assert names(dataset(), foreign=True) == set()


def test_nothing_is_said_without_several_workers() -> None:
    assert names(FromAttribute(), foreign=True, workers=1) == set()
    assert found(Healthy(), worker_noise.workers, data=(loader(*numbers()), None)) == {}
