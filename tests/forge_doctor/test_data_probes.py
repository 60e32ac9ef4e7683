"""Probes of data name their mistake, and leave a healthy neighbour alone: splits, columns, maps, samples."""

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
from forge_doctor.experiments import columns, pairs, stages
from forge_doctor.probes import data, serving, start
from tests.support.patients import Healthy, Made, Regression, found, loader, numbers, random

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


# -- columns ----------------------------------------------------------------------------------------------------------


def table(train: Callable[[Tensor, Tensor], Tensor], val: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, Any]:
    """Inputs that are made of numbers and of the target, in each split."""
    made = []
    for change, count, seed in ((train, 900, 1), (val, 400, 2)):
        x = random(count, 8, seed=seed)
        y = 0.5 * x[:, 0] + random(count, seed=seed + 10)
        made.append(loader(change(x, y), y))
    return made[0], made[1]


def kept(x: Tensor, y: Tensor) -> Tensor:
    return x


def leaked(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], x[:, -1:] + 0.5 * y[:, None]], 1)


def filled(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], 1)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


@pytest.mark.parametrize(
    ("train", "val", "name", "level"),
    [
        (kept, kept, "", ""),
        (leaked, kept, "splits_disagree", "note"),
        (kept, filled, "constant_columns", "warning"),
        (scaled, scaled, "split_statistics", "warning"),
    ],
)
def test_a_column_says_the_same_in_both_splits(train: Any, val: Any, name: str, level: str) -> None:
    told = found(Regression(), columns.compared, data=table(train, val))
    assert {key: finding.level for key, finding in told.items()} == ({name: level} if name else {})


# -- ids --------------------------------------------------------------------------------------------------------------


class Ranks(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 4), nn.Embedding(200, 4)

    def training_step(self, batch: Any) -> Any:
        user, item, other = batch
        scores = [(self.users(user)[:, None] * self.items(x)).sum(-1) for x in (item[:, None], other)]
        return F.softplus(scores[1] - scores[0]).mean()

    def validation_step(self, batch: Any) -> Any:
        user, item, _ = batch
        return {"score": (self.users(user) * self.items(item)).sum(-1).mean()}


@pytest.mark.parametrize("held_out", [True, False])
def test_items_that_are_held_out_are_not_trained_on(held_out: bool) -> None:
    chosen = torch.stack([torch.randperm(200, generator=torch.Generator().manual_seed(u))[:12] for u in range(60)])
    users, items = torch.arange(60).repeat_interleave(11), chosen[:, : 11 if held_out else None][:, -11:]
    train = DataLoader(Made(lambda i: (users[i], items.flatten()[i], torch.randint(200, (3,))), len(users)), 16)
    val = loader(torch.arange(60), chosen[:, -1], torch.zeros(60, 200), shuffle=False)
    assert set(found(Ranks(), data.known, data=(train, val))) == (set() if held_out else {"leakage"})


def encoded(rows: str) -> Any:
    """Samples with a column that holds the mean target of their group, by the samples of `rows`."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(0, 30, (400,), generator=generator)
    x = torch.randn(400, 8, generator=generator)
    y = torch.randn(30, generator=generator)[group] + x[:, 0] + torch.randn(400, generator=generator)
    used = torch.arange(400) < (400 if rows == "all" else 300)
    mean = torch.stack(
        [(y[used & (group == k)].sum() + 2 * y.mean()) / (used & (group == k)).sum().add(2) for k in range(30)]
    )
    x[:, 5] = (mean[group] - mean.mean()) / mean.std()
    train, val = ((x[rows], y[rows].unsqueeze(1)) for rows in (slice(0, 300), slice(300, None)))
    return loader(*train), loader(*val, shuffle=False)


def test_a_column_that_is_made_of_the_targets_of_val() -> None:
    told = found(Regression(), columns.compared, data=encoded("all"))["leakage"]
    assert told.message.startswith("Number 5 of tensor 0 of a sample takes 30 values")
    assert "leakage" not in found(Regression(), columns.compared, data=encoded("train"))


def test_targets_that_are_filled_in() -> None:
    (train, val), known = encoded("train"), torch.rand(300, generator=torch.Generator().manual_seed(1)) > 0.3
    x, y = train.dataset.tensors
    filled = loader(x, torch.where(known[:, None], y, 0.0)), val
    assert "exactly 0" in found(Regression(), columns.compared, data=filled)["targets_filled_in"].message
    assert "targets_filled_in" not in found(Regression(), columns.compared, data=(train, val))


def scene(index: int, turns: str) -> Any:
    """A bright corner, and a map of it; where it turns, together or apart."""
    generator = torch.Generator().manual_seed(index)
    high, wide = torch.randint(2, 6, (2,), generator=generator).tolist()
    y = torch.zeros(8, 8, dtype=torch.long)
    y[:high, :wide] = 1
    x = y[None] + 0.2 * torch.randn(1, 8, 8, generator=generator)
    for axis in (-1, -2) if turns else ():
        flips = torch.rand(2) < 0.5
        x = x.flip(axis) if flips[0] else x
        y = y.flip(axis) if flips[0 if turns == "together" else 1] else y
    return (1 + torch.rand(())) * x, y


@pytest.mark.parametrize(("turns", "names"), [("apart", {"pairs_broken"}), ("together", set()), ("", set())])
def test_a_map_is_turned_with_its_picture(turns: str, names: set[str]) -> None:
    train, val = Made(lambda i: scene(i, turns), 80), Made(lambda i: scene(1000 + i, ""), 60)
    task = task_of_maps()
    assert set(found(task, pairs.maps, data=(DataLoader(train, 16, shuffle=True), DataLoader(val, 20)))) == names


def task_of_maps() -> Healthy:
    task = Healthy()
    task.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    return task
