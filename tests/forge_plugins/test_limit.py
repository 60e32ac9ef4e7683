"""limit: a run over some batches equals a run over a loader that has no others, and resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import forge
from forge.data import Loader, TensorLoader
from forge.errors import CheckpointError, ForgeError, RecipeError
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import Checkpoint, Limit
from tests.forge.snapshot.test_resume import Noisy, die, live


class Seen(TinyTask):
    """Keeps the first number of every batch by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float]] = {"train": [], "val": [], "test": []}

    def _step(self, batch: Any, stage: str) -> Any:
        self.seen[stage].append(float(batch[0][0, 0]))
        return super().training_step(batch)

    def training_step(self, batch: Any) -> Any:
        return self._step(batch, "train")

    def validation_step(self, batch: Any) -> Any:
        return self._step(batch, "val")

    def test_step(self, batch: Any) -> Any:
        return self._step(batch, "test")


class Counting(IterableDataset):
    """A stream with a state, which its next pass continues from."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(self.at)
            self.at += 1
            yield torch.randn(6, generator=generator), self.at % 3

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def first(batches: list[Any]) -> list[float]:
    return [float(x[0, 0]) for x, _ in batches]


# -- which batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "count"), [(3, 3), (0.6, 3), (0.59, 2), (0.01, 1), (1.0, 5), (9, 5)])
def test_a_number_is_batches_and_a_fraction_is_a_share(limit: float, count: int) -> None:
    short, result = fit_tiny([Limit(train=limit)])
    plain, expected = fit_tiny([], train=tiny_batches()[:count])
    assert_same(short, plain)
    assert (result.updates, result.metrics) == (2 * count, expected.metrics)


def test_each_stage_has_its_own_limit() -> None:
    task, trainer = Seen(), forge.Trainer(plugins=[Limit(train=1, val=2, test=3)], max_epochs=1, run_dir=False)
    val, test = tiny_batches(seed=1), tiny_batches(seed=2)
    trainer.fit(task, tiny_batches(), {"a": val, "b": test})
    trainer.test(task, test)
    assert task.seen["train"] == first(tiny_batches())[:1]
    assert task.seen["val"] == [*first(val)[:2], *first(test)[:2]]
    assert task.seen["test"] == first(test)[:3]


def test_an_epoch_is_shuffled_as_without_a_limit() -> None:
    def numbers(plugins: list[Any]) -> list[float]:
        task = Seen()
        fit_tiny(plugins, task=task, train=Loader(Noisy(), 8, shuffle=True), max_epochs=2)
        return task.seen["train"]

    whole = numbers([])
    assert numbers([Limit(train=2)]) == [*whole[:2], *whole[6:8]]


def test_overfit_repeats_the_first_batches() -> None:
    task = Seen()
    fit_tiny([Limit(overfit=2)], task=task, train=Loader(Noisy(), 8, shuffle=True), max_epochs=3)
    assert task.seen["train"] == task.seen["train"][:2] * 3
    assert len(set(task.seen["train"])) == 2


@pytest.mark.parametrize("values", [{"train": 0}, {"train": 1.5}, {"test": 0}, {"val": -1}, {"val": 0.0}])
def test_a_limit_that_leaves_nothing_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=rf"limit\.{next(iter(values))} is"):
        Limit(**values)


def test_a_share_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"0\.5 of the train loader is unknown"):
        fit_tiny([Limit(train=0.5)], train=DataLoader(Counting(), batch_size=8))


def stateful() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    forge.seed(5)  # its sampler draws a seed as it is made
    return torchdata.StatefulDataLoader(Noisy(), batch_size=8, shuffle=True)


# -- resuming ---------------------------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorLoader(Noisy().x, Noisy().y, batch_size=8, shuffle=True),
    "workers": lambda: Loader(Noisy(), 8, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Counting(), batch_size=8),
    "stateful": stateful,
}
CASES = [("tensors", "overfit"), ("workers", "overfit"), ("stream", "train"), ("stateful", "train")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "option"), CASES)
def test_a_limited_run_resumes_in_the_same_bits(kind: str, option: str, tmp_path: Path) -> None:
    options = {option: 4}
    stack: Callable[[], list[Any]] = lambda: [Limit(**options), Checkpoint(every="1 updates", background=False)]  # noqa: E731
    straight, expected = live(tmp_path / "straight", stack(), task=Seen(), train=LOADERS[kind]())
    seen: list[float] = []
    for update in (3, 5, 10):  # each repeats this update: from within an epoch, its end, and within the last
        task = Seen()
        die(tmp_path / "cut", stack(), update, task=task, train=LOADERS[kind]())
        seen += task.seen["train"][:-1]
    resumed, result = live(tmp_path / "cut", stack(), task=Seen(), train=LOADERS[kind]())
    assert [*seen, *resumed.seen["train"]] == straight.seen["train"]
    assert_same(resumed, straight)
    assert (result.metrics, result.updates) == (expected.metrics, 12)


def test_another_limit_is_refused_at_resume(tmp_path: Path) -> None:
    die(tmp_path, [Limit(train=4), Checkpoint("1 updates")], 2)
    with pytest.raises(CheckpointError, match="limit was 4 and is 3"):
        live(tmp_path, [Limit(train=3), Checkpoint("1 updates")])
