"""accumulate: micro-batches that count like the one big batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import RecipeError
from forge_plugins import Accumulate
from tests.support.tasks import fit, make_batches

Batch = tuple[Tensor, Tensor]


class Exact(forge.TaskModule):
    """Double precision, so that only a wrong weight can make a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3, dtype=torch.float64)

    def training_step(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].double()), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Tokens(Exact):
    """Averages over labels that count, as a language model does."""

    def training_step(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].double()), batch[1], ignore_index=-100)

    def num_items(self, batch: Batch) -> Tensor:
        return (batch[1] != -100).sum()


def batches(*sizes: int) -> list[Batch]:
    return [make_batches(1, size, seed)[0] for seed, size in enumerate(sizes)]


def big(micros: list[Batch], window: int) -> list[Batch]:
    """Every window as one batch."""
    parts = [micros[i : i + window] for i in range(0, len(micros), window)]
    return [(torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts]


@pytest.mark.parametrize(
    ("sizes", "window"),
    [((4, 4, 4, 4, 4, 4), 3), ((1, 7, 3, 5, 2, 6), 3), ((4, 4, 4, 4, 3), 2), ((4, 2), 100)],
    ids=["equal", "unequal", "a short last window", "longer than the epoch"],
)
def test_micro_batches_equal_one_big_batch(sizes: tuple[int, ...], window: int) -> None:
    task, micros = Exact(), batches(*sizes)
    other = copy.deepcopy(task)
    fit(task, train=micros, max_epochs=3, plugins=[Accumulate(window)])
    fit(other, train=big(micros, window), max_epochs=3)
    torch.testing.assert_close(task.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)


def test_weights_that_are_tensors_keep_a_loss_in_float32() -> None:
    kinds: list[torch.dtype] = []

    class Short(Tokens):
        def training_step(self, batch: Batch) -> Tensor:
            return super().training_step(batch).float()

        @forge.hookimpl
        def forge_backward(self, step: forge.Step, loss: Tensor) -> None:
            kinds.append(loss.dtype)

    fit(Short(), train=batches(4, 3), plugins=[Accumulate(2)])
    assert kinds == [torch.float32] * 2


def test_a_loader_without_a_length_is_windowed_the_same_way() -> None:
    micros, task = batches(4, 4, 4, 4, 3), Exact()
    other = copy.deepcopy(task)
    fit(task, train=iter(micros), plugins=[Accumulate(2)])
    fit(other, train=micros, plugins=[Accumulate(2)])
    torch.testing.assert_close(task.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_the_window_knows_its_length_before_its_first_backward() -> None:
    seen: list[tuple[int, int, bool]] = []

    class Watch(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_micro_step(self, step: forge.Step) -> Any:
            seen.append((step.micro, len(step.window), step.is_last_micro))
            return (yield)

    fit(train=make_batches(3), plugins=[Accumulate(2), Watch()])
    assert seen == [(0, 2, False), (1, 2, True), (0, 1, True)]


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"accumulate\.window is 0; it must be at least 1"):
        Accumulate(0)


# -- windows by epoch -------------------------------------------------------------------------------------------------


def test_a_window_by_epoch_equals_other_batches_by_epoch() -> None:
    micros, task = batches(4, 4, 4, 4, 4), Exact()
    other = copy.deepcopy(task)
    result = fit(task, train=micros, max_epochs=4, plugins=[Accumulate({0: 5, 1: 2, 3: 1})])
    optimizer = other.configure_optimizers()
    for window in (5, 2, 2, 1):
        for batch in big(micros, window):
            optimizer.zero_grad()
            other.training_step(batch).backward()
            optimizer.step()
    assert result.updates == 1 + 3 + 3 + 5
    torch.testing.assert_close(task.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("epochs", "most", "planned"), [(2, None, 4), (4, None, 12), (4, 7, 7)])
def test_windows_by_epoch_are_planned(epochs: int, most: int | None, planned: int) -> None:
    trainer = forge.Trainer(
        max_epochs=epochs, max_updates=most, plugins=[Accumulate({0: 5, 1: 2, 3: 1})], run_dir=False
    )
    assert trainer.fit(Exact(), batches(4, 4, 4, 4, 4)).updates == trainer.planned_updates == planned


@pytest.mark.parametrize("window", [{}, {1: 2}, {0: 0}, {0: 2, 3: -1}])
def test_windows_by_epoch_that_say_too_little_are_refused(window: dict[int, int]) -> None:
    with pytest.raises(RecipeError, match=r"accumulate\.window is"):
        Accumulate(window)
