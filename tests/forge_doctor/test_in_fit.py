"""What a plain fit sees: labels of classes in a regression, values that are not finite in val."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from tests.support.patients import Healthy, loader, numbers, said, splits


def two() -> Any:
    x, y = numbers()
    return loader(x, (y > 1).long())


def two_as_floats() -> Any:
    x, y = numbers()
    return loader(x, (y > 1).float())


def rows_of_ones() -> Any:
    x, y = numbers()
    return loader(x, F.one_hot(y, 4).float())


class Plain(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(scores, y)


class OneOutput(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(scores[:, 0], y.float())


class Brier(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(scores[:, 0].sigmoid(), y.float())


class OneHot(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(scores, F.one_hot(y, 4).float())


class BrierOfRows(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(scores.softmax(1), F.one_hot(y, 4).float())


class SoftLabels(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, F.one_hot(y, 4).float())


@pytest.mark.parametrize(
    ("task", "data", "names"),
    [
        (OneOutput, two, ["class_ids_in_regression"]),
        (OneOutput, two_as_floats, ["class_ids_in_regression"]),
        (OneHot, None, ["class_ids_in_regression"]),
        (Plain, rows_of_ones, ["class_ids_in_regression"]),
        (Healthy, rows_of_ones, []),
        (Brier, two, []),
        (BrierOfRows, None, []),
        (SoftLabels, None, []),
    ],
)
def test_labels_of_classes_in_a_regression(task: type[Healthy], data: Any, names: list[str]) -> None:
    assert said(task(), data() if data else splits()[0]) == names


class FillsIn(Healthy):
    """Takes missing values for zero."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.nan_to_num(0.0))


@pytest.mark.parametrize(("task", "names"), [(Healthy, ["bad_values"]), (FillsIn, [])])
def test_values_of_val_that_are_not_finite_where_the_results_are_not(task: type[Healthy], names: list[str]) -> None:
    x, y = numbers(48, seed=5)
    x[40, 3] = float("nan")  # in the last batch
    assert said(task(), splits()[0], loader(x, y, shuffle=False), max_epochs=2) == names
