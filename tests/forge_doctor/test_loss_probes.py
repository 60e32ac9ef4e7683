"""Probes of losses, padding and targets name their mistake, and leave a healthy neighbour alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.experiments import equivariance
from forge_doctor.probes import losses
from tests.support.patients import Healthy, found, loader, numbers, splits, task_with

# -- losses -----------------------------------------------------------------------------------------------------------


LOSSES = {
    "activation_before_loss": lambda s, y: F.cross_entropy(s.softmax(1), y, label_smoothing=0.1),
    "relu_before_loss": lambda s, y: F.cross_entropy(s.relu(), y),
    "wrong_dimension": lambda s, y: F.nll_loss(s.log_softmax(0), y),
    "dropout_on_output": lambda s, y: F.cross_entropy(F.dropout(s, 0.5), y),
    "output_range": lambda s, y: F.mse_loss(s[:, 0].relu(), y.float() - 1.5),
    "broadcast_loss": lambda s, y: ((s[:, :1] - y.float()) ** 2).mean(),
    "hidden_from_autograd": lambda s, y: F.cross_entropy(s + s.data.mean(), y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_inputs_of_a_loss(name: str) -> None:
    assert name in found(task_with(LOSSES[name]), losses.inputs)


QUIET = {
    "pairs of one tensor": lambda s, y: F.cross_entropy(s, y) + (s[:, 0].unsqueeze(1) - s[:, 0]).abs().mean(),
    "regression": lambda s, y: F.mse_loss(s[:, 0].relu(), y.float() + 0.5),
    "logits": lambda s, y: F.binary_cross_entropy_with_logits(s[:, 0], (y > 1).float()),
    "plus and minus one": lambda s, y: F.soft_margin_loss(s[:, 0], 2 * (y > 1).float() - 1),
}


@pytest.mark.parametrize("name", QUIET)
def test_right_inputs_of_a_loss_are_left_in_peace(name: str) -> None:
    assert found(task_with(QUIET[name]), losses.inputs, losses.reduction) == {}


def test_sums_and_mixtures_are_told_from_means() -> None:
    summed = task_with(lambda s, y: F.cross_entropy(s, y, reduction="sum"))
    mixed = task_with(lambda s, y: F.cross_entropy(s, y) + (s**2).sum())
    assert set(found(summed, losses.reduction)) == {"sum_reduction"}
    assert set(found(mixed, losses.reduction)) == {"mixed_reductions"}


def test_weights_of_classes_that_are_reversed() -> None:
    x, y = numbers(400)
    keep = (y == 0) | (torch.arange(400) % 6 == 0)
    served = loader(x[keep], y[keep]), splits()[1]
    counts = torch.bincount(y[keep], minlength=4).float()
    inverse = 1 / counts
    other = inverse.sort().values[torch.tensor([1, 3, 0, 2])[counts.argsort().argsort()]]
    cases = ((counts, {"weights_reversed"}), (inverse, set()), (other, {"weights_reversed"}), (torch.ones(4), set()))
    for weight, names in cases:
        task = task_with(lambda s, y, weight=weight: F.cross_entropy(s, y, weight))
        assert set(found(task, losses.weights, data=served)) == names


def padded_words() -> Tensor:
    """Rows of words 1 to 7 of different lengths, padded with 0."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, 8, (64, 12), generator=generator)
    lengths = torch.randint(3, 11, (64, 1), generator=generator)
    return torch.where(torch.arange(12) < lengths, words, 0)


class Tagger(Healthy):
    """A tag for each word; `ignored` is the label that its loss leaves out."""

    ignored = -100

    def __init__(self) -> None:
        super().__init__()
        self.words, self.net = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.words(x))

    def training_step(self, batch: Any) -> Any:
        words, tags = batch
        return F.cross_entropy(self(words).flatten(0, 1), tags.flatten(), ignore_index=type(self).ignored)

    validation_step = training_step


@pytest.mark.parametrize(("ignored", "names"), [(-100, {"padding_in_loss"}), (0, set())])
def test_padding_in_the_loss(ignored: int, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tagger, "ignored", ignored)
    served = loader(padded_words(), padded_words())
    assert set(found(Tagger(), equivariance.cropped, data=(served, served))) == names


class Distils(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 4)

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        return F.kl_div(self(x).log_softmax(1), self.target(x).softmax(1), reduction="batchmean")

    def target(self, x: Tensor) -> Tensor:
        return self.teacher(x)


class DistilsRightly(Distils):
    def target(self, x: Tensor) -> Tensor:
        return self.teacher(x).detach()


def test_a_target_that_carries_a_gradient() -> None:
    assert "target_has_gradient" in found(Distils(), losses.inputs)
    assert found(DistilsRightly(), losses.inputs) == {}


class Smoothed(Healthy):
    smoothing = 0.1

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y, label_smoothing=self.smoothing)


class Confident(Smoothed):
    smoothing = 0.9


def test_smoothing_is_not_confidence() -> None:
    assert "label_smoothing" in found(Confident(), losses.options)
    assert found(Smoothed(), losses.options) == {}


class Tags(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y)

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}


def test_labels_that_compete() -> None:
    x, y = numbers(64)
    several, one = (x[:, :4] > 0).float(), F.one_hot(y, 4).float()
    assert "competing_labels" in found(Tags(), losses.inputs, data=(loader(x, several), None))
    assert found(Tags(), losses.inputs, data=(loader(x, one), None)) == {}
