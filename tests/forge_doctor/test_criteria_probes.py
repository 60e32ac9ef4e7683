"""What losses are given: smoothing, pairs, triplets, bounds, padding and bootstrapped targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.probes import criteria
from tests.support.patients import Healthy, found, loader, numbers


class Smoothed(Healthy):
    smoothing = 0.1

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y, label_smoothing=self.smoothing)


class Confident(Smoothed):
    smoothing = 0.9


def test_smoothing_is_not_confidence() -> None:
    assert "label_smoothing" in found(Confident(), criteria.options)
    assert found(Smoothed(), criteria.options) == {}


class Tags(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(scores.softmax(1), y)

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}


def test_labels_that_compete() -> None:
    x, y = numbers(64)
    several, one = (x[:, :4] > 0).float(), F.one_hot(y, 4).float()
    assert "competing_labels" in found(Tags(), criteria.options, data=(loader(x, several), None))
    assert found(Tags(), criteria.options, data=(loader(x, one), None)) == {}


class Pairs(Healthy):
    """Two views of a sample find each other."""

    scale = 10.0

    def scores(self, x: Tensor) -> Tensor:
        left, right = F.normalize(self.net(x), dim=1), F.normalize(self.net(x + 0.1), dim=1)
        return self.scale * left @ right.T

    def training_step(self, batch: Any) -> Any:
        scores = self.scores(batch[0])
        return F.cross_entropy(scores, self.labels(scores))

    def labels(self, scores: Tensor) -> Tensor:
        return torch.arange(len(scores))


class AllToTheFirst(Pairs):
    def labels(self, scores: Tensor) -> Tensor:
        return torch.zeros(len(scores), dtype=torch.long)


class FirstColumn(AllToTheFirst):
    """The positive is moved to the first column, and its label is 0."""

    def scores(self, x: Tensor) -> Tensor:
        scores = super().scores(x)
        size = len(scores)
        others = scores[~torch.eye(size, dtype=torch.bool)].view(size, size - 1)
        return torch.cat([scores.diagonal()[:, None], others], 1)


class Cold(Pairs):
    scale = 0.07


def test_every_row_is_told_to_match_one() -> None:
    assert "contrastive_labels" in found(AllToTheFirst(), criteria.contrast)
    assert found(Pairs(), criteria.contrast) == found(FirstColumn(), criteria.contrast) == {}


def test_scores_that_no_weights_make_large() -> None:
    assert "bounded_logits" in found(Cold(), criteria.bounds)
    assert found(Pairs(), criteria.bounds) == found(Healthy(), criteria.bounds) == {}


class Triplets(Healthy):
    def training_step(self, batch: Any) -> Any:
        anchor, positive, negative = (self(x) for x in batch)
        return F.triplet_margin_loss(anchor, positive, negative)


class Mined(Triplets):
    """The hardest ones of a batch are rightly the wrong way round."""

    def training_step(self, batch: Any) -> Any:
        z = self(batch[0])
        order = torch.cdist(z, z).argsort(1)
        return F.triplet_margin_loss(z, z[order[:, -1]], z[order[:, 1]])


def test_triplets_in_the_wrong_order() -> None:
    x, far = torch.randn(64, 8), 3 * torch.randn(64, 8)
    near = x + 0.1
    assert "triplet_order" in found(Triplets(), criteria.triplets, data=(loader(x, far, near), None))
    assert found(Triplets(), criteria.triplets, data=(loader(x, near, far), None)) == {}
    assert found(Mined(), criteria.triplets, data=(loader(x, near, far), None)) == {}


class Walks(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[..., 0]

    def training_step(self, batch: Any) -> Any:
        x, y, _ = batch
        return F.mse_loss(self(x), y)


class MaskedWalks(Walks):
    def training_step(self, batch: Any) -> Any:
        x, y, lengths = batch
        real = torch.arange(y.shape[1]) < lengths[:, None]
        return F.mse_loss(self(x)[real], y[real])


def test_padded_steps_in_a_regression() -> None:
    lengths = 2 + torch.arange(48) % 7
    real = (torch.arange(8) < lengths[:, None]).float()
    rows = loader(torch.randn(48, 8, 8) * real[..., None], torch.randn(48, 8) * real, lengths)
    assert "padding_in_loss" in found(Walks(), criteria.padded_numbers, data=(rows, None))
    assert found(MaskedWalks(), criteria.padded_numbers, data=(rows, None)) == {}
    full = loader(torch.randn(48, 8, 8), torch.randn(48, 8), lengths)
    assert found(Walks(), criteria.padded_numbers, data=(full, None)) == {}


class Values(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1))

    def target(self, reward: Tensor, following: Tensor) -> Tensor:
        return reward + 0.9 * self(following).squeeze(1)

    def training_step(self, batch: Any) -> Any:
        state, reward, following = batch
        return F.mse_loss(self(state).squeeze(1), self.target(reward, following))


class ByHand(Values):
    def training_step(self, batch: Any) -> Any:
        state, reward, following = batch
        return (self.target(reward, following) - self(state).squeeze(1)).square().mean()


class Detached(Values):
    def target(self, reward: Tensor, following: Tensor) -> Tensor:
        return super().target(reward, following).detach()


class Views(Values):
    """Two views of a sample are to be alike: both sides train rightly."""

    def training_step(self, batch: Any) -> Any:
        state, _, following = batch
        return F.mse_loss(self(state), self(following))


def test_a_bootstrapped_target_is_detached() -> None:
    rows = loader(torch.randn(48, 8), torch.randn(48), torch.randn(48, 8)), None
    assert "target_has_gradient" in found(Values(), criteria.bootstrap, data=rows)
    assert "target_has_gradient" in found(ByHand(), criteria.bootstrap, data=rows)
    assert found(Detached(), criteria.bootstrap, data=rows) == found(Views(), criteria.bootstrap, data=rows) == {}
