"""Each probe of splits, served samples and prepared numbers names its mistake, and leaves a healthy neighbour alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import forge
from forge_doctor.experiments import pairs, stages
from forge_doctor.probes import data, serving, start
from tests.support.patients import Healthy, found, loader, numbers


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Regression(Healthy):
    """One number from some numbers."""

    def __init__(self, inputs: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.mse_loss(self(x).squeeze(1), y)

    validation_step = training_step


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_a_class_that_is_multiplied_before_the_split(before: bool) -> None:
    x, y = numbers(400)
    rare, common = (y == 0).nonzero().flatten(), (y > 0).nonzero().flatten()
    again = (rare[:10], rare[:10]) if before else (rare[:10], rare[10:20])
    train = torch.cat([common[:200], again[0].repeat(12)])
    val = torch.cat([common[200:], again[1].repeat(2)])
    names = set(found(Healthy(), data.copies, data=(loader(x[train], y[train]), loader(x[val], y[val]))))
    assert ("leakage" in names) == before


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


def test_windows_of_several_channels_overlap() -> None:
    x, y = windows()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    for two in (torch.stack([x, x + 1], 1), torch.stack([x, x + 1], 2)):
        assert set(found(Regression(32), data.overlaps, data=split(two, y, order))) == {"leakage"}


def test_windows_that_are_split_by_time_touch_at_the_border() -> None:
    x, y = windows()
    assert found(Regression(16), data.overlaps, data=split(x, y, torch.arange(len(x)), 30)) == {}
    assert found(Regression(16), data.overlaps, data=split(x, y, torch.arange(len(x)).flip(0), 30)) == {}


def test_a_series_that_repeats_itself_may_be_split() -> None:
    x, y = windows(series=random(20).repeat(25))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert found(Regression(16), data.overlaps, data=split(x, y, order)) == {}


# -- how samples are served -------------------------------------------------------------------------------------------


class Denoise(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch: Any) -> Any:
        noisy, clean = batch
        return F.mse_loss(self(noisy), clean)

    validation_step = training_step


@pytest.mark.parametrize(("count", "names"), [(1, {"repeated_noise"}), (64, set())])
def test_noise_is_drawn_for_each_sample(count: int, names: set[str]) -> None:
    clean, noise = random(64, 8), random(count, 8, seed=2)
    assert set(found(Denoise(), serving.noise, data=(loader(clean + noise, clean), None))) == names


def test_an_offset_is_no_noise() -> None:
    clean = random(64, 8)
    assert found(Denoise(), serving.noise, data=(loader(clean + torch.linspace(0, 1, 8), clean), None)) == {}


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
    report = forge.doctor(Healthy(), DataLoader(dataset, 16), budget=0)
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


class Drawn(Dataset[Any]):
    """Noise from a generator of its own."""

    def __init__(self, seed: int | None):
        self.x, self.y = numbers()
        self.own = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + float(self.own.normal()), self.y[index]


@pytest.mark.parametrize(("seed", "names"), [(None, {"unseeded"}), (0, set())])
def test_a_generator_that_nothing_seeds(seed: int | None, names: set[str]) -> None:
    def again() -> DataLoader[Any]:
        return DataLoader(Drawn(seed), 16)

    assert set(found(Healthy(), data.generator, data=(again(), None), rebuild=again)) == names


# -- how numbers are prepared -----------------------------------------------------------------------------------------


class Normalised(Healthy):
    """Two channels of four values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize(("batch", "names"), [(1, {"batch_norm_small_batch"}), (2, set()), (16, set())])
def test_batch_norm_of_one_sample(batch: int, names: set[str]) -> None:
    given = loader(*numbers(24), batch=batch), None
    assert set(found(Normalised(), start.normalised_samples, data=given)) == names


# -- other people's data ----------------------------------------------------------------------------------------------


PROBES = (
    *(data.copies, data.overlaps, pairs.follow),
    *(serving.noise, start.normalised_samples),
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
