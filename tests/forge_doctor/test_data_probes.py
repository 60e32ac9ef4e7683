"""Probes of data name their mistake, and leave a healthy neighbour alone: splits, columns, maps, samples."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import forge
from forge_doctor.experiments import pairs, stages
from forge_doctor.probes import data, serving
from tests.support.patients import Healthy, Regression, found, loader, numbers, random

# -- splits -----------------------------------------------------------------------------------------------------------


def windows(length: int = 16, series: Tensor | None = None) -> tuple[Tensor, Tensor]:
    series = random(500).cumsum(0) / 10 if series is None else series
    cut = series.unfold(0, length + 1, 1)
    return cut[:, :-1], cut[:, -1]


def split(x: Tensor, y: Tensor, order: Tensor, count: int = 100) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, val = order[count:], order[:count]
    return loader(x[train], y[train]), loader(x[val], y[val])


def test_windows_that_are_split_at_random_overlap() -> None:
    x, y = windows()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert set(found(Regression(16), data.overlaps, data=split(x, y, order))) == {"leakage"}


def test_windows_that_are_split_by_time_touch_at_the_border() -> None:
    x, y = windows()
    assert found(Regression(16), data.overlaps, data=split(x, y, torch.arange(len(x)), 30)) == {}
    assert found(Regression(16), data.overlaps, data=split(x, y, torch.arange(len(x)).flip(0), 30)) == {}


# -- how samples are served -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "names"), [(1, {"repeated_noise"}), (64, set())])
def test_noise_is_drawn_for_each_sample(count: int, names: set[str]) -> None:
    clean, noise = random(64, 8), random(count, 8, seed=2)
    assert set(found(Regression(8, 8), serving.noise, data=(loader(clean + noise, clean), None))) == names


class Stored(Dataset[Any]):
    """Changes what it stores in place."""

    def __init__(self, x: Any, y: Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        x *= 0.9
        return torch.as_tensor(x), self.y[index]


class Cached(Stored):
    """Prepares a sample when it is first read, and has a table of how often each is read."""

    def __init__(self, x: Tensor, y: Tensor):
        super().__init__(x, y)
        self.ready = torch.full_like(x, torch.nan)
        self.read = torch.zeros(len(y))

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        if self.ready[index].isnan().any():
            self.ready[index] = self.x[index] * 0.9
        return self.ready[index], self.y[index]


@pytest.mark.parametrize("stored", [lambda x: x, lambda x: x.numpy(), list])
def test_reading_a_sample_changes_it(stored: Callable[[Tensor], Any]) -> None:
    x, y = numbers()
    dataset = Stored(stored(x.clone()), y)
    assert set(found(Healthy(), data=(DataLoader(dataset, 16), None))) == {"dataset_changed"}


def test_a_cache_that_is_filled_is_no_change() -> None:
    dataset = Cached(*numbers())
    assert found(Healthy(), data=(DataLoader(dataset, 16), None)) == {}


def test_the_doctor_puts_data_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("forge_doctor.doctor"), "BEFORE", {})
    x, y = numbers()
    dataset = Stored(x.clone(), y)
    report = forge.doctor(Healthy(), DataLoader(dataset, 16))
    assert "dataset_changed" in {finding.name for finding in report.errors}
    assert torch.equal(dataset.x, x)


class Pictures(Dataset[Any]):
    """A bright half, which tells the class; flipped left to right at random if that is asked for."""

    def __init__(self, sides: tuple[Callable[[Tensor], Tensor], ...], flips: bool, count: int = 60):
        self.flips = flips
        self.y = torch.arange(count) % 2
        bright = torch.zeros(1, 6, 6)
        bright[:, :3] = 3
        noise = 0.5 * random(count, 1, 6, 6, seed=count)
        self.x = torch.stack([sides[int(y)](bright) for y in self.y]) + noise

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        is_flipped = self.flips and bool(torch.rand(()) < 0.5)
        return self.x[index].flip(-1) if is_flipped else self.x[index], self.y[index]


UP_DOWN = (lambda x: x, lambda x: x.flip(-2))
LEFT_RIGHT = (lambda x: x.mT, lambda x: x.mT.flip(-1))


class Sides(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))


@pytest.mark.parametrize(
    ("sides", "flips", "names"),
    [(LEFT_RIGHT, True, {"augmentation_changes_label"}), (LEFT_RIGHT, False, set()), (UP_DOWN, True, set())],
)
def test_flips_that_change_the_class(sides: Any, flips: bool, names: set[str]) -> None:
    given = DataLoader(Pictures(sides, flips, 80), 16, shuffle=True), DataLoader(Pictures(sides, False), 16)
    assert set(found(Sides(), pairs.follow, data=given)) == names


class Seeds(Healthy):
    def training_step(self, batch: Any) -> Any:
        torch.manual_seed(0)
        x, y = batch
        return self.loss(self(x + 0.1 * torch.randn_like(x)), y)


def test_seeds_that_are_set_while_training() -> None:
    assert set(found(Seeds(), stages.same_draws)) == {"reseeded"}
    assert found(Healthy(), stages.same_draws) == {}


# -- how numbers are prepared -----------------------------------------------------------------------------------------


# -- other people's data ----------------------------------------------------------------------------------------------


PROBES = (
    data.copies,
    data.overlaps,
    pairs.follow,
    serving.noise,
)


class Named(Healthy):
    """Batches are dicts with words in them."""

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch["x"]), batch["y"])

    validation_step = training_step


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        x, y = numbers()
        yield from ({"x": a, "y": b, "name": "a word"} for a, b in zip(x, y, strict=True))


class Scalars(Healthy):
    """Each sample is two numbers without dimensions, and a word of its own length."""

    def training_step(self, batch: Any) -> Any:
        x, y, _ = batch
        return F.mse_loss(self(x[:, None].expand(-1, 8))[:, 0], y)


def test_samples_of_single_numbers_are_examined() -> None:
    words = [torch.randint(5, (16, 3 + k), generator=torch.Generator().manual_seed(k)) for k in range(20)]
    batches = [(random(16, seed=k), random(16, seed=50 + k), word) for k, word in enumerate(words)]
    assert found(Scalars(), *PROBES, data=(batches, batches[:7])).keys() <= {"val_is_train"}


def test_odd_data_are_left_alone() -> None:
    x, y = numbers()
    batches = [{"x": a, "y": b, "name": ["a word"] * 16} for a, b in zip(x.split(16), y.split(16), strict=True)]
    assert found(Named(), *PROBES, data=(batches, None)) == {}
    assert found(Named(), *PROBES, data=(DataLoader(Stream(), 16), None)) == {}


# -- columns ----------------------------------------------------------------------------------------------------------


def table(train: Callable[[Tensor, Tensor], Tensor], val: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, Any]:
    """Inputs that are made of numbers and of the target, in each split."""
    made = []
    for change, count, seed in ((train, 900, 1), (val, 400, 2)):
        x = random(count, 8, seed=seed)
        y = 0.5 * x[:, 0] + random(count, seed=seed + 10)
        made.append(loader(change(x, y), y))
    return made[0], made[1]


# -- ids --------------------------------------------------------------------------------------------------------------
