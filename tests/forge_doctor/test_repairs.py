"""Small edits of the user's own code: which there are, that they leave no trace, and what they show."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import forge
from forge_doctor.experiments.edits import edits_of, function_of
from forge_doctor.experiments.repairs import repairs
from tests.support.patients import Healthy, found, loader, numbers


def scaled(x: Tensor, factor: int = 2) -> Tensor:
    y = x.flip(0)
    if factor > 1:
        y = y * factor
    return y.sum(0) - x[1:].mean(dim=0)


def endless(x: int) -> int:
    while x > 0:
        x = x - 1
    return x


def edited(function: Any, *given: Any, names: bool = False) -> dict[str, Any]:
    """What a function returns with each of its edits, by what the edit says."""
    results = {}
    for edit in edits_of(function, names):
        with edit.made():
            try:
                results[str(edit)] = function(*given)
            except Exception as error:
                results[str(edit)] = type(error)
    return results


def test_edits_change_a_sign_a_dimension_a_bound_and_leave_lines_out() -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    plain = scaled(x)
    seen = edited(scaled, x)
    assert seen["without `y = x.flip(0)`"] is UnboundLocalError
    assert seen["`x` in place of `x.flip(0)`"] == plain  # a sum does not see the order
    assert seen["`y.sum(0) + x[1:].mean(dim=0)` in place of `y.sum(0) - x[1:].mean(dim=0)`"] == 17
    assert seen["`x` in place of `x[1:]`"] == pytest.approx(14 - 7 / 3)
    assert seen["`:1` in place of `1:`"] == 13
    assert seen["`factor <= 1` in place of `factor > 1`"] == 4
    assert seen["without `dim=0`"] == plain
    assert scaled(x) == plain, "the function is what it was"
    others = edited(scaled, x, names=True)
    assert others["`y` in place of `x`"] == 14 - 3  # in its last place; in the first there is no y yet
    assert others["`-y` in place of `y`"] == -14 - 3


def test_a_function_that_may_loop_for_ever_is_not_edited() -> None:
    assert list(edits_of(endless)) == [] == list(edits_of(endless, names=True))


def test_edits_keep_what_a_function_closes_over_and_super() -> None:
    depth = 3

    def near(x: int) -> int:
        return x + depth

    class Child(Healthy):
        def loss(self, scores: Tensor, y: Tensor) -> Tensor:
            return 2 * super().loss(scores, y)

    assert edited(near, 4)["`x - depth` in place of `x + depth`"] == 1
    scores, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    seen = edited(Child.loss, Child(), scores, y)
    assert torch.equal(
        seen["`super().loss(scores, y)` in place of `2 * super().loss(scores, y)`"], F.cross_entropy(scores, y)
    )


def test_an_error_puts_the_code_back() -> None:
    own = scaled.__code__
    for edit in edits_of(scaled):
        with pytest.raises(RuntimeError), edit.made():
            assert_runs(edit.code)
        assert scaled.__code__ is own


def assert_runs(code: Any) -> None:
    assert scaled.__code__ is code
    raise RuntimeError


class Framed:
    """Each of its functions returns the frame that it runs in."""

    def method(self) -> Any:
        return sys._getframe()

    @classmethod
    def of_class(cls) -> Any:
        return sys._getframe()

    @property
    def read(self) -> Any:
        return sys._getframe()


def test_a_function_is_found_by_its_frame() -> None:
    def inner() -> Any:
        return sys._getframe()

    def wrapped() -> Any:
        return functools.wraps(inner)(lambda: inner())()

    thing = Framed()
    for frame in (thing.method(), thing.of_class(), thing.read, inner(), wrapped()):
        function = function_of(frame)
        assert function is not None
        assert function.__code__ is frame.f_code


class Reversed(Healthy):
    """Reads its numbers in another order in training."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        x = x.flip(1)
        return self.loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Squashed(Healthy):
    """Its model adds up over the numbers, where it should over the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(8, 16)
        self.lr = 1e-2

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(x).unflatten(1, (4, 4)).relu()
        return heads.sum(2).softmax(0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Rising(Healthy):
    """Goes up the loss."""

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return -F.cross_entropy(scores, y)


class Samples(Dataset[Any]):
    """Numbers, of which those of train are turned round."""

    def __init__(self, x: Tensor, y: Tensor, turns: bool):
        self.x, self.y, self.turns = x, y, turns

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i]
        if self.turns:
            x = x.flip(0)
        return x, self.y[i]


def named(task: forge.TaskModule, data: Any = None) -> Any:
    return found(task, repairs, data=data, last=True).get("line_holds_back")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (Reversed, "x = x.flip(1)"),
        (Squashed, "return heads.sum(2).softmax(0)"),
        (Rising, "return -F.cross_entropy(scores, y)"),
    ],
)
def test_a_line_that_holds_learning_back_is_named(task: Callable[[], forge.TaskModule], line: str) -> None:
    finding = named(task())
    assert f"In `{line}`" in finding.message
    assert "test_repairs.py:" in finding.where


def test_a_line_of_a_dataset_is_named() -> None:
    train, val = Samples(*numbers(), turns=True), Samples(*numbers(48, seed=5), turns=False)
    finding = named(Fast(), (DataLoader(train, 16, shuffle=True), DataLoader(val, 16)))
    assert "In `x = x.flip(0)`" in finding.message


class Fast(Healthy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class NextWord(forge.TaskModule):
    """Predicts the next word; without its mask it would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        hidden = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        return self.out(x + self.attend(x, x, x, attn_mask=hidden)[0])

    def training_step(self, batch: Any) -> Any:
        (words,) = batch
        return F.cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_healthy_tasks_are_not_named_and_a_mask_is_no_hindrance() -> None:
    assert named(Fast()) is None
    words = torch.randint(12, (96, 10), generator=torch.Generator().manual_seed(0))
    assert named(NextWord(), (loader(words[:64]), loader(words[64:]))) is None
