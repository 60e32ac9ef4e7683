"""Laws of the data: samples stay together in a batch, vary together, and say the same in train as in val."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

from forge_doctor.experiments import collated, columns, company, equivariance, pairs, storage, values
from forge_doctor.probes import data
from tests.support.patients import Healthy, found, loader, numbers
from tests.support.profiles import some


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Made(Dataset[Any]):
    """Samples that a function makes of a number."""

    def __init__(self, make: Callable[[int], Any], count: int = 200):
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Numbers(Healthy):
    """A number, or several, from some numbers."""

    def __init__(self, inputs: int = 8, outputs: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))

    def training_step(self, batch: Any) -> Any:
        x, y = batch[:2]
        return F.mse_loss(self(x), y.reshape(len(x), -1))

    validation_step = training_step


# -- samples in a batch -----------------------------------------------------------------------------------------------


class Words(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.table(x).mean(1))

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[-1])

    validation_step = training_step


def text(index: int) -> tuple[Tensor, int]:
    length = 3 + 7 * index % 11
    return (torch.arange(length) * (index + 3) + index) % 49 + 1, index * index // 7 % 4


def sorted_by_length(labels: bool, lengths: bool = True, restores: bool = False) -> Callable[[Any], Any]:
    def collate(items: Any) -> Any:
        size, y = torch.tensor([len(x) for x, _ in items]), torch.tensor([y for _, y in items])
        order = size.argsort(descending=True)
        x = pad_sequence([items[i][0] for i in order], batch_first=True)
        told = (order.argsort(),) if restores else ()
        return x, size[order] if lengths else size, *told, y[order] if labels else y

    return collate


@pytest.mark.parametrize(
    ("collate", "names"),
    [
        (sorted_by_length(labels=True), set()),
        (sorted_by_length(labels=False), {"pairs_broken"}),
        (sorted_by_length(labels=True, lengths=False), {"pairs_broken"}),
        (sorted_by_length(labels=False, restores=True), set()),
    ],
)
def test_a_batch_keeps_labels_with_their_texts(collate: Any, names: set[str]) -> None:
    given = DataLoader(Made(text), 16, collate_fn=collate), None
    assert set(found(Words(), collated.together, data=given)) == names


def test_negatives_of_a_batch_are_no_broken_pairs() -> None:
    def collate(items: Any) -> Any:
        x, y = torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        return x, y, x.roll(1, 0), y.roll(1, 0)

    x, y = random(200, 8), random(200)
    given = DataLoader(Made(lambda i: (x[i], y[i])), 16, collate_fn=collate), None
    assert found(Numbers(), collated.together, data=given) == {}


# -- readings of a sample ---------------------------------------------------------------------------------------------


def turned(apart: bool) -> Callable[[int], Any]:
    stored = random(200, 4, 4)

    def make(index: int) -> Any:
        one, other = (torch.rand(2) < 0.5).tolist()
        x = stored[index]
        moved = lambda z, turn: z.flip(-1) if turn else z  # noqa: E731
        return moved(x, one) * (1 + 0.2 * torch.rand(())), moved(x.abs(), other if apart else one)

    return make


@pytest.mark.parametrize("apart", [False, True])
def test_an_input_and_its_target_vary_together(apart: bool) -> None:
    given = DataLoader(Made(turned(apart)), 16), None
    told = found(Numbers(16, 16), pairs.together, data=given)
    assert set(told) == ({"pairs_broken"} if apart else set())
    assert all(finding.level == "error" for finding in told.values())


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


def coded(offset: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The first column as eight kinds, which have other names."""
    kinds = lambda x: (8 * torch.special.ndtr(x)).long().clamp(0, 7)  # noqa: E731
    return lambda x, y: torch.cat([(kinds(x[:, :1]) * 3 + offset) % 8, x[:, 1:]], 1)


def filled(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], 1)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def stretched(x: Tensor, y: Tensor) -> Tensor:
    return (x - x.amin(0)) / (x.amax(0) - x.amin(0))


@pytest.mark.parametrize(
    ("train", "val", "name", "level"),
    [
        (kept, kept, "", ""),
        (coded(0), coded(0), "", ""),
        (leaked, kept, "splits_disagree", "note"),
        (coded(0), coded(2), "splits_disagree", "note"),
        (kept, lambda x, y: x.roll(1, 0), "splits_disagree", "note"),
        (filled, filled, "", ""),
        (kept, filled, "constant_columns", "warning"),
        (scaled, kept, "", ""),
        (scaled, scaled, "split_statistics", "warning"),
        (stretched, stretched, "split_statistics", "warning"),
    ],
)
def test_a_column_says_the_same_in_both_splits(train: Any, val: Any, name: str, level: str) -> None:
    told = found(Numbers(), columns.compared, data=table(train, val))
    assert {key: finding.level for key, finding in told.items()} == ({name: level} if name else {})


def test_few_samples_that_are_served_again_and_again_say_no_more_than_they_are() -> None:
    (x, y), (other, its) = ((random(n, 8, seed=n), random(n, seed=n + 1)) for n in (40, 300))
    again = torch.arange(1200) % 40
    assert found(Numbers(), columns.compared, data=(loader(x[again], y[again]), loader(other, its))) == {}


def test_codes_that_are_numbered_in_each_split() -> None:
    shares = torch.tensor([0.01] * 5 + [0.2, 0.25, 0.5])

    def kinds(count: int, numbered: bool) -> Tensor:
        drawn = torch.multinomial(shares, count, True, generator=torch.Generator().manual_seed(count))
        return (drawn - 3 * numbered).clamp(0)

    class Kinds(Healthy):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.table(x))

    def split(count: int, numbered: bool = False) -> Any:
        return loader(kinds(count, numbered), torch.arange(count) % 4)

    assert (
        "other numbers"
        in found(Kinds(), columns.compared, data=(split(900), split(400, True)))["splits_disagree"].message
    )
    assert found(Kinds(), columns.compared, data=(split(900), split(400))) == {}


# -- what is stored ---------------------------------------------------------------------------------------------------


class Windows(Dataset[Any]):
    """Windows of one series: 12 numbers, and the 4 that follow."""

    def __init__(self, kind: str = ""):
        self.series, self.kind = random(600).cumsum(0) / 4, kind

    def __len__(self) -> int:
        return len(self.series) - 16

    def __getitem__(self, index: int) -> Any:
        window = self.series[index : index + 16]
        if self.kind == "as it is":
            return window[:12], window[12:]
        level = window.mean() if self.kind == "whole" else window[:12].mean()
        return window[:12] - level, window[12:] - level


def in_time(windows: Windows) -> tuple[Any, Any]:
    return Subset(windows, range(400)), Subset(windows, range(420, len(windows)))


def by_chance(windows: Windows) -> tuple[Any, Any]:
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(windows, order[:400]), Subset(windows, order[400:])


@pytest.mark.parametrize(
    ("kind", "split", "told"),
    some(
        [
            ("", in_time, ""),
            ("", by_chance, "overlap"),
            ("whole", in_time, "statistics of the input"),
            ("as it is", in_time, ""),
            ("as it is", by_chance, "overlap"),
        ],
        quick=3,
    ),
)
def test_what_a_target_is_made_of(kind: str, split: Any, told: str) -> None:
    windows = Windows(kind)
    before = windows.series.clone()
    train, val = (DataLoader(part, 16) for part in split(windows))
    said = found(Numbers(12, 4), storage.made_of, data=(train, val))
    assert set(said) == ({"leakage"} if told else set())
    assert all(told in finding.message for finding in said.values())
    assert torch.equal(windows.series, before)


class Whole(Windows):
    """A window whose input is the target, shifted, with noise, or with a part hidden."""

    def __getitem__(self, index: int) -> Any:
        window = self.series[index : index + 16] - self.series[index : index + 16].mean()
        if self.kind == "shifted":
            return window[:12], window[1:13]
        if self.kind == "hidden":
            return window[:12] * (torch.rand(12) < 0.5), window[:12]
        return window[:12] + 0.1 * torch.randn(12), window[:12]


@pytest.mark.parametrize("kind", some(["shifted", "hidden", "noisy"]))
def test_an_input_may_hold_its_target(kind: str) -> None:
    train, val = (DataLoader(part, 16) for part in in_time(Whole(kind)))
    assert found(Numbers(12, 12), storage.made_of, data=(train, val)) == {}


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


def test_what_healthy_data_say() -> None:
    laws = (collated.together, pairs.together, columns.compared, storage.made_of, data.known)
    x, y = numbers(400)
    assert found(Healthy(), *laws, data=(loader(x[:280], y[:280]), loader(x[280:], y[280:]))) == {}


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


class Level(Healthy):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.mse_loss(self(x)[:, :1], y)

    validation_step = training_step


def test_a_column_that_is_made_of_the_targets_of_val() -> None:
    told = found(Level(), columns.compared, data=encoded("all"))["leakage"]
    assert told.message.startswith("Number 5 of tensor 0 of a sample takes 30 values")
    assert "leakage" not in found(Level(), columns.compared, data=encoded("train"))


def test_targets_that_are_filled_in() -> None:
    (train, val), known = encoded("train"), torch.rand(300, generator=torch.Generator().manual_seed(1)) > 0.3
    x, y = train.dataset.tensors
    filled = loader(x, torch.where(known[:, None], y, 0.0)), val
    assert "exactly 0" in found(Level(), columns.compared, data=filled)["targets_filled_in"].message
    assert "targets_filled_in" not in found(Level(), columns.compared, data=(train, val))


class FilledIn(Level):
    """Learns from a target that is missing as if it were 0."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return super().training_step((x, y.nan_to_num()))

    validation_step = training_step


class LeftOut(Level):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        known = y[:, 0].isfinite()
        return super().training_step((x[known], y[known]))

    validation_step = training_step


def test_a_step_that_fills_in_targets() -> None:
    (train, val), known = encoded("train"), torch.rand(300, generator=torch.Generator().manual_seed(1)) > 0.3
    x, y = train.dataset.tensors
    data = loader(x, torch.where(known[:, None], y, torch.nan)), val
    assert found(FilledIn(), values.finite, data=data)["targets_filled_in"].level == "warning"
    assert set(found(LeftOut(), values.finite, data=data)) == {"bad_values"}


class Frames(Healthy):
    """Names each frame of an utterance. `fill`: what stands for the frames that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self.net(x)
        known = y != -1
        return {
            "loss": F.cross_entropy(scores.transpose(1, 2), y, ignore_index=-1),
            "accuracy": (scores.argmax(-1) == y)[known].float().mean(),
        }

    validation_step = training_step


def utterances(fill: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    items = []
    for length in torch.randint(4, 12, (80,), generator=generator).tolist():
        x = torch.randn(length, 8, generator=generator)
        items.append((x, x[:, :4].argmax(1)))

    def collate(rows: list[Any]) -> Any:
        return pad_sequence([x for x, _ in rows], True), pad_sequence([y for _, y in rows], True, fill)

    return tuple(DataLoader(part, 16, collate_fn=collate) for part in (items[:60], items[60:]))  # pyright: ignore[reportArgumentType]


def test_padding_that_is_named_as_a_class() -> None:
    told = found(Frames(), equivariance.padded, data=utterances(0))["padding_in_loss"]
    assert "padding counts" in told.message
    assert found(Frames(), equivariance.padded, data=utterances(-1)) == {}


class Stored(Dataset[Any]):
    """Pictures of noise, stored with their channels last."""

    def __init__(self, moved: bool) -> None:
        self.pictures = torch.randint(0, 255, (64, 8, 8, 3), generator=torch.Generator().manual_seed(0))
        self.moved = moved

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> Any:
        picture = self.pictures[i]
        return (picture.permute(2, 0, 1) if self.moved else picture.reshape(3, 8, 8)).float() / 255, i % 4


class Wide(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))


def test_pictures_whose_axes_are_renamed() -> None:
    told, moved = (found(Wide(), values.stored_layout, data=[DataLoader(Stored(m), 16)] * 2) for m in (False, True))
    assert "not moved" in told["pixels_scrambled"].message
    assert moved == {}


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


class Graphs(Healthy):
    """Sums what neighbours send, over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.send = nn.Linear(4, 8)

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor, count: int) -> Tensor:
        received = torch.zeros(len(x), 8).index_add(0, edges[1], self.send(x)[edges[0]])
        return self.net(torch.zeros(count, 8).index_add(0, owner, received))

    def training_step(self, batch: Any) -> Any:
        x, edges, owner, y = batch
        return F.cross_entropy(self(x, edges, owner, len(y)), y)

    validation_step = training_step


@pytest.mark.parametrize("adds", [True, False])
def test_edges_that_join_other_graphs(adds: bool) -> None:
    def graph(i: int) -> Any:
        size = 3 + i % 4
        path = torch.arange(size - 1)
        return random(size, 4, seed=i), torch.stack([path, path + 1]), i % 4

    def collate(samples: list[Any]) -> Any:
        edges, owner, offset = [], [], 0
        for number, (x, pairs_, _) in enumerate(samples):
            edges.append(pairs_ + offset)
            owner += [number] * len(x)
            offset = offset + len(x) if adds else len(x)
        y = torch.tensor([y for *_, y in samples])
        return torch.cat([x for x, *_ in samples]), torch.cat(edges, 1), torch.tensor(owner), y

    served = [DataLoader(Made(graph), 16, shuffle=shuffle, collate_fn=collate) for shuffle in (True, False)]
    assert set(found(Graphs(), company.alone, data=tuple(served))) == (set() if adds else {"depends_on_company"})
