"""State that no state_dict holds: generators go on where they were; what else changes is named once, with the cure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import forge
from forge.checkpoint import StoredCheckpoint
from forge.data import Loader, TensorLoader
from forge.snapshot.sandbox import without_side_effects
from forge.testing import TinyTask, tiny_batches
from forge_plugins import Checkpoint
from tests.forge.data.test_prefetch import Ahead
from tests.forge.snapshot.test_resume import Noisy, die, live, resumes

MODULE_RNG = np.random.default_rng(8)
"""A global of a task's module."""


class Drawing(TinyTask):
    """Adds noise from a source of the test's choice to every batch."""

    def __init__(self, draw: Callable[[], float]):
        super().__init__()
        self.draw = draw

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(self(x * (1 + self.draw())), y)}


class Source:
    def __init__(self, generator: Any):
        self.generator = generator

    def __call__(self) -> float:
        if isinstance(self.generator, torch.Generator):
            return torch.rand(1, generator=self.generator).item()
        return float(self.generator.normal() if hasattr(self.generator, "normal") else self.generator.gauss(0, 1))


class SlotSource:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random(1)

    def __call__(self) -> float:
        return self.generator.random()


class ClassSource:
    """Like MONAI's Randomizable, whose instances share a generator on the class."""

    R = np.random.RandomState(2)

    def __call__(self) -> float:
        return self.R.rand()


def in_closure() -> Callable[[], float]:
    generator = np.random.Generator(np.random.Philox(1))
    return lambda: generator.random()


def of_module() -> Callable[[], float]:
    MODULE_RNG.bit_generator.state = np.random.default_rng(8).bit_generator.state
    return Uses()


class Uses:
    def __call__(self) -> float:
        return MODULE_RNG.random()


def of_another_module() -> Callable[[], float]:
    """A plain function of a module that defines no class of the run, with a generator among its globals."""
    module = ModuleType("their_transforms")
    exec("import random\nRNG = random.Random(4)\ndef draw():\n    return RNG.random()", vars(module))
    return module.draw


def of_keyword() -> Callable[[], float]:
    def draw(*, generator: random.Random = random.Random(5)) -> float:  # noqa: B008
        return generator.random()

    return draw


def of_class() -> Callable[[], float]:
    ClassSource.R.seed(2)
    return ClassSource()


SOURCES: dict[str, Callable[[], Callable[[], float]]] = {
    "torch": lambda: Source(torch.Generator().manual_seed(1)),
    "numpy": lambda: Source(np.random.default_rng(1)),
    "numpy legacy": lambda: Source(np.random.RandomState(1)),
    "Mersenne twister": lambda: Source(np.random.Generator(np.random.MT19937(1))),
    "python": lambda: Source(random.Random(1)),
    "slots": SlotSource,
    "closure": in_closure,
    "class": of_class,
    "global": of_module,
    "global of another": of_another_module,
    "keyword": of_keyword,
}


class Sum:
    """Draws from every source, so that one that begins anew changes the weights."""

    def __init__(self) -> None:
        self.sources = {kind: make() for kind, make in SOURCES.items()}

    def __call__(self) -> float:
        return sum(draw() for draw in self.sources.values())


@pytest.mark.parametrize("kind", ["all at once", *[pytest.param(kind, marks=pytest.mark.slow) for kind in SOURCES]])
def test_generators_of_the_task_go_on(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make = SOURCES.get(kind, Sum)
    resumes(tmp_path, lambda: {"task": Drawing(make()), "max_epochs": 2}, lambda updates: [7], every="3 updates")
    assert "changes during training" not in caplog.text


def test_an_uninterrupted_run_draws_what_a_plain_loop_draws(tmp_path: Path) -> None:
    task, generator = Drawing(Source(np.random.default_rng(1))), np.random.default_rng(1)
    live(tmp_path, [Checkpoint(every="1 update")], task=task, validate_every=None)
    assert [generator.normal() for _ in range(16)][-1] == task.draw.generator.normal()  # pyright: ignore[reportFunctionMemberAccess]


# -- data -------------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]):
        self.x, self.y, self.transform = Noisy().x, Noisy().y, transform

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.x[index]), self.y[index]


class Jitter:
    """Keeps generators as albumentations does, and replaces none."""

    def __init__(self) -> None:
        self.random_generator, self.py_random = np.random.default_rng(7), random.Random(7)
        self.inner = [nn.Identity(), {"torch": torch.Generator().manual_seed(7)}]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.inner[1]["torch"])  # pyright: ignore[reportIndexIssue, reportArgumentType]
        return x * self.py_random.random() + self.random_generator.normal() + noise


class Mixes:
    """A collate function with a generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, samples: Any) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x * float(self.rng.beta(2, 2)), y


LOADERS: dict[str, Callable[[Any, int], Any]] = {
    "Loader": lambda data, workers: Loader(data, 8, shuffle=True, num_workers=workers),
    "DataLoader": lambda data, workers: DataLoader(data, 8, shuffle=True, num_workers=workers),
    "own sampler": lambda data, workers: DataLoader(data, 8, sampler=list(range(40, 0, -1)), num_workers=workers),
    "collate": lambda data, workers: Loader(data, 8, num_workers=workers, collate_fn=Mixes()),
}


def check_resume(folder: Path, loader: Callable[[], Any]) -> None:
    resumes(folder, lambda: {"train": loader(), "max_epochs": 2}, lambda updates: [8], every="3 updates")


@pytest.mark.parametrize("kind", LOADERS)
def test_generators_of_the_data_go_on(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    check_resume(tmp_path, lambda: LOADERS[kind](Augmented(Jitter()), 0))
    assert "changes during training" not in caplog.text


@pytest.mark.parametrize(
    "kind", [kind if kind == "Loader" else pytest.param(kind, marks=pytest.mark.slow) for kind in LOADERS]
)
def test_generators_of_the_data_go_on_in_workers(tmp_path: Path, kind: str) -> None:
    check_resume(tmp_path, lambda: LOADERS[kind](Augmented(Jitter()), 2))


def test_without_workers_the_data_draw_as_in_a_plain_loop() -> None:
    data = Augmented(Jitter())
    expected = torch.stack([data[i][0] for i in range(8)])
    assert torch.equal(next(iter(Loader(Augmented(Jitter()), 8, seed=3)))[0], expected)


class Stream(IterableDataset):
    """Without a length: the run reads one batch ahead of the window."""

    def __init__(self) -> None:
        self.rng, self.at = np.random.default_rng(5), 0

    def __iter__(self) -> Any:
        while self.at < 40:
            self.at += 1
            yield torch.randn(6, generator=torch.Generator().manual_seed(self.at)) + self.rng.normal(), self.at % 3
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_generators_of_a_stream_go_on(tmp_path: Path, workers: int) -> None:
    check_resume(tmp_path, lambda: Loader(Stream(), 8, num_workers=workers))


def test_generators_of_prefetched_data_go_on(tmp_path: Path) -> None:
    check_resume(tmp_path, lambda: Ahead(Loader(Augmented(Jitter()), 8, shuffle=True)))


# -- resuming with others ---------------------------------------------------------------------------------------------


def test_a_generator_that_is_only_saved_or_only_here_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = [Checkpoint(every="1 update")]
    die(tmp_path, saver, 3, task=Drawing(SOURCES["torch"]()))
    other: dict[str, Any] = {"max_epochs": None, "allow_inexact": True}
    live(tmp_path, saver, task=Drawing(lambda: 0.0), max_updates=4, **other)
    assert "The checkpoint has the state of task.draw.generator, which this run does not have" in caplog.text
    live(tmp_path, saver, task=Drawing(SOURCES["slots"]()), max_updates=5, **other)
    assert "The checkpoint has no state of task.draw.generator: it starts from its first state" in caplog.text


def test_the_position_of_a_loader_is_no_hidden_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Batches:
        """A loader of another library, with the usual `set_epoch`."""

        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            return iter(tiny_batches([4] * 3, seed=self.epoch))

    x, y = (torch.cat(part) for part in zip(*tiny_batches([4] * 3), strict=True))
    for train in (TensorLoader(x, y, batch_size=4), Batches()):
        live(
            tmp_path / type(train).__name__,
            [Checkpoint(every="1 update")],
            train=train,
            max_epochs=3,
            allow_inexact=True,
        )
    assert "changes during training" not in caplog.text


def test_a_checkpoint_without_generators_has_no_key_for_them(tmp_path: Path) -> None:
    live(tmp_path, [Checkpoint(every="1 epoch")], max_epochs=1)
    assert sorted(StoredCheckpoint.find(tmp_path).load()["rng"][0]) == ["device", "numpy", "python", "torch"]


def test_running_something_again_leaves_the_tasks_generator(tmp_path: Path) -> None:
    task, drawn = Drawing(Source(np.random.default_rng(1))), []

    @forge.on("boundary", mutates=True)
    def again(trainer: forge.Trainer) -> None:
        with without_side_effects(trainer):
            drawn.append(task.draw())

    live(tmp_path, [again], task=task, max_updates=1, max_epochs=None, validate_every=None)
    assert task.draw() == drawn[0]
