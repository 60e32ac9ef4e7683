"""CombinedLoader gives what Lightning's gives, resumes exactly, and divides its batches among ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from forge.data import CombinedLoader, Loader, TensorLoader
from forge.data.sharding import RankLoader
from forge.env import Env, move
from forge.errors import DataError
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import Limit
from tests.forge.snapshot.test_resume import Noisy, resumes
from tests.support.profiles import some

MODES = ["max_size_cycle", "max_size", "min_size", "sequential"]


def numbers(count: int, size: int = 2, **options: Any) -> TensorLoader:
    return TensorLoader(torch.arange(count), batch_size=size, **options)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value[0].tolist() if isinstance(value, (tuple, list)) else value


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_are_lightnings(mode: Any) -> None:
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader
    make = lambda: {"a": numbers(3), "b": numbers(9), "c": numbers(2)}  # noqa: E731
    theirs = combined(make(), mode)
    expected = [plain(batch) for batch, _, _ in iter(theirs)]
    ours = CombinedLoader(make(), mode)
    assert [plain(batch) for batch in ours] == expected
    assert len(ours) == len(theirs) == len(expected)


def test_a_shorter_loader_is_shuffled_anew_in_each_round() -> None:
    loader = CombinedLoader({"a": numbers(40, 4), "b": numbers(8, 4, shuffle=True)})
    rounds = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        seen = [batch["b"][0].tolist() for batch in loader]
        rounds += [tuple(seen[i] + seen[i + 1]) for i in range(0, 10, 2)]
    assert all(sorted(numbers) == list(range(8)) for numbers in rounds)
    assert len(set(rounds)) == len(rounds)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", [0, 1, 3, 5])
def test_any_position_is_the_rest_of_the_epoch(mode: Any, start: int) -> None:
    make = lambda: CombinedLoader({"a": numbers(7, shuffle=True), "b": numbers(12, shuffle=True)}, mode)  # noqa: E731
    whole, rest = make(), make()
    whole.set_epoch(3)
    rest.seek(3, start)
    assert [plain(batch) for batch in rest] == [plain(batch) for batch in whole][start:]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_divide_every_batch(mode: Any) -> None:
    make = lambda: CombinedLoader({"a": numbers(7, 4), "b": numbers(12, 4)}, mode)  # noqa: E731
    parts = [[plain(portion.batch) for portion in RankLoader(make(), rank, 2, "train")] for rank in (0, 1)]
    for whole, left, right in zip(make(), *parts, strict=True):
        if isinstance(whole, dict):
            for name, batch in whole.items():
                both = None if batch is None else [*left[name], *right[name]]
                assert both == plain(batch)
        else:
            assert [*left, *right] == plain(whole)


class Both(TinyTask):
    """Trains on the batches of two loaders."""

    def training_step(self, batch: Any) -> Any:
        a, b = super().training_step(batch["a"]), super().training_step(batch["b"])
        return {"loss": a["loss"] + b["loss"], "a": a["loss"]}


def train() -> dict[str, Any]:
    """A loader with augmentation, and a plain DataLoader that is shorter."""
    return {"a": Loader(Noisy(), 8, shuffle=True), "b": DataLoader(Noisy(20), 8, shuffle=True)}


def test_the_same_step_as_with_batches_made_by_hand() -> None:
    a, b = tiny_batches(seed=1), tiny_batches((8, 8), seed=2)
    combined, _ = fit_tiny([], task=Both(), train={"a": a, "b": b}, max_epochs=1)
    pairs = [{"a": a[i], "b": b[i % 2]} for i in range(5)]
    by_hand, _ = fit_tiny([], task=Both(), train=pairs, max_epochs=1)
    assert_same(combined, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("limited", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_over_several_loaders_resumes(tmp_path: Path, limited: bool) -> None:
    plugins = lambda: [Limit(train=5)] if limited else []  # noqa: E731
    resumes(tmp_path, lambda: {"task": Both(), "train": train()}, lambda updates: [2, 6, 9], plugins=plugins)


class Stream(IterableDataset):
    """Numbers in turn, without a length; endless if `count` is None."""

    def __init__(self, count: int | None):
        self.count = count

    def __iter__(self) -> Any:
        numbers = itertools.count() if self.count is None else range(self.count)
        return (torch.tensor(number) for number in numbers)


def streams(*counts: int | None) -> dict[str, Any]:
    names = "abc"[: len(counts)]
    return {name: DataLoader(Stream(count), 2) for name, count in zip(names, counts, strict=True)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [(3, 9, 2), (5, 4), (4, 4)])
def test_streams_are_combined_as_lightning_does(mode: Any, counts: tuple[int, ...]) -> None:
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader
    plain_of = lambda batch: {k: None if v is None else v.tolist() for k, v in batch.items()}  # noqa: E731
    listed = (lambda batch: batch.tolist()) if mode == "sequential" else plain_of
    expected = [listed(batch) for batch, _, _ in iter(combined(streams(*counts), mode))]
    ours = CombinedLoader(streams(*counts), mode)
    for _ in range(2):  # each epoch begins the streams again
        assert [listed(batch) for batch in ours] == expected
    ours.seek(0, 2)
    assert [listed(batch) for batch in ours] == expected[2:]
    with pytest.raises(TypeError, match="no length, because 'a' has none"):
        len(ours)


class Samples(IterableDataset):
    """Samples of TinyTask's, without a length."""

    def __iter__(self) -> Any:
        return iter(Noisy())


def test_a_run_over_a_stream_without_a_state_resumes(tmp_path: Path) -> None:
    train = lambda: {"a": Loader(Noisy(), 8), "b": Loader(Samples(), 8)}  # noqa: E731
    resumes(tmp_path, lambda: {"task": Both(), "train": train()}, lambda updates: [2, 9])


class Walk(IterableDataset):
    """A stream with a state: where it is, and the random numbers that it goes on drawing from pass to pass."""

    def __init__(self, count: int):
        self.count, self.at, self.generator = count, 0, torch.Generator().manual_seed(5)

    def __iter__(self) -> Any:
        while self.at < self.count:
            self.at += 1
            yield torch.randn(6, generator=self.generator), torch.tensor(self.at % 3)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


def stateful(walk: int, samples: int) -> dict[str, Any]:
    """A stream with a state, torchdata's loader, and one with positions."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(0)  # torchdata's sampler draws its seed here
    return {
        "a": Loader(Walk(walk), 8),
        "b": torchdata.StatefulDataLoader(Noisy(samples), batch_size=8, shuffle=True),
        "c": Loader(Noisy(30), 8, shuffle=True),
    }


class OneOrSeveral(TinyTask):
    """Trains on one batch, or on those of several loaders that have not ended."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)

    def training_step(self, batch: Any) -> Any:
        given = [part for part in batch.values() if part is not None] if isinstance(batch, dict) else [batch]
        return sum(super(OneOrSeveral, self).training_step(part)["loss"] for part in given)

    def num_items(self, batch: Any) -> int:
        return 1


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "mode"), some(itertools.product([(40, 20), (18, 62)], MODES)))
def test_a_run_over_streams_with_a_state_resumes(tmp_path: Path, mode: Any, lengths: tuple[int, int]) -> None:
    def cuts(updates: int) -> list[int]:
        ends = updates // 3
        return sorted({1, 2, ends - 1, ends, ends + 1, 2 * ends - 1, 2 * ends, 2 * ends + 2})

    given = lambda: {"task": OneOrSeveral(), "train": CombinedLoader(stateful(*lengths), mode)}  # noqa: E731
    resumes(tmp_path, given, cuts)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(DataError, match="'b' is empty"):
        CombinedLoader({"a": numbers(3), "b": []})
    with pytest.raises(DataError, match=r"'b' gave no batch when it was read again\. Use 'max_size'"):
        list(CombinedLoader({"a": streams(9)["a"], "b": iter(numbers(3))}))
    with pytest.raises(DataError, match="Did you mean 'min_size'"):
        CombinedLoader({"a": numbers(3)}, "minsize")  # pyright: ignore[reportArgumentType]


# -- other loaders and batches ----------------------------------------------------------------------------------------


class MovesInPlace:
    """A batch like chemprop's: `to` moves its parts and returns nothing."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y

    def to(self, device: torch.device) -> None:
        self.x, self.y = self.x.to(device), self.y.to(device)


def test_a_batch_that_moves_in_place_is_kept() -> None:
    class InPlace(TinyTask):
        def training_step(self, batch: Any) -> Any:
            return super().training_step((batch.x, batch.y))

        def num_items(self, batch: Any) -> int:
            return len(batch.y)

    batch = MovesInPlace(*tiny_batches()[0])
    assert Env("cpu").move(batch) is batch
    moved = move(MovesInPlace(*tiny_batches()[0]), torch.device("meta"))
    assert moved.x.is_meta
    task, _ = fit_tiny(
        [], task=InPlace(), train=[MovesInPlace(*b) for b in tiny_batches()], val=None, validate_every=None
    )
    assert_same(task, fit_tiny([], validate_every=None)[0])
