"""check_loader: a loader that keeps a protocol passes, and one that breaks it is refused by what it does wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from forge.contract.protocols import Averages, Indexed, LiveLoader, Seekable, Stateful
from forge.data import Loader, Rollouts, TensorLoader
from forge.errors import DataError
from forge.testing import TinyTask, check_loader
from forge_plugins import EMA


class ByPosition:
    """Ten numbers in an order that follows from the epoch, three at a time."""

    def __init__(self) -> None:
        self.start = self.epoch = 0

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(10), 10)

    def seek(self, epoch: int, samples: int) -> None:
        self.epoch, self.start = epoch, samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.start = self.start, 0
        order = self.order()
        return iter([torch.tensor(order[first : first + 3]) for first in range(start, 10, 3)])


class Forgets(ByPosition):
    """Begins every pass at the first sample."""

    def seek(self, epoch: int, samples: int) -> None:
        self.epoch = epoch


class ByState:
    """Ten numbers, three at a time, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 10:
            first, self.at = self.at, self.at + 3
            yield torch.arange(first, min(first + 3, 10))
        self.at = 0


class NoState(ByState):
    """Has the methods, and keeps nothing."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Miscounts(TensorLoader):
    """Names one sample too few."""

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        return super().sample_indices(epoch, start, stop)[1:]


def numbers(kind: type[TensorLoader] = TensorLoader) -> TensorLoader:
    return kind(torch.arange(20.0).view(10, 2), torch.arange(10), batch_size=3, shuffle=True, seed=1)


def rollouts() -> Rollouts:
    def collect(task: Any) -> tuple[torch.Tensor, ...]:
        return torch.rand(8, 8), torch.randint(0, 3, (8,))

    return Rollouts(collect, batch_size=4)


@pytest.mark.parametrize(
    ("make", "protocol"),
    [
        (ByPosition, "Seekable"),
        (ByState, "Stateful"),
        (numbers, "Indexed"),
        (lambda: Loader([(torch.full((2,), float(n)), n) for n in range(10)], batch_size=4, shuffle=True), "Indexed"),
        (lambda: DataLoader(TensorDataset(torch.arange(10)), batch_size=4), "Seekable"),
        (lambda: [torch.arange(3), torch.arange(2), torch.arange(4)], "Seekable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_resumes_exactly_passes_by_its_protocol(make: Any, protocol: str) -> None:
    assert check_loader(make) == protocol


def test_live_data_pass_with_a_task() -> None:
    assert check_loader(rollouts, TinyTask()) == "LiveLoader"
    with pytest.raises(ValueError, match=r"check_loader\(make, task\)"):
        check_loader(rollouts)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Forgets, "Forgets, cut after 1 batches and begun again, gives another batch 2"),
        (NoState, "NoState gives another batch after its state was loaded"),
        (lambda: (n for n in range(3)), "can be read only once"),
        (lambda: numbers(Miscounts), "Miscounts.position counts 10 samples in 4 batches, and sample_indices names 9"),
    ],
)
def test_what_does_not_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises((AssertionError, DataError), match=said):
        check_loader(make)


def test_a_protocol_is_what_an_object_has() -> None:
    assert isinstance(ByPosition(), Seekable)
    assert not isinstance(ByPosition(), Indexed)
    assert isinstance(numbers(), Indexed)
    assert isinstance(ByState(), Stateful)
    assert isinstance(rollouts(), LiveLoader)
    assert isinstance(EMA(), Averages)
